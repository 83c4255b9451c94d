// Objects with a thread of their own, which may be dropped anywhere, on that thread too.
#pragma once

#include <memory>
#include <utility>

namespace fold3d {

/// A pointer to an object that its thread keeps alive. When the last copy goes, on whichever thread,
/// the object is told to `leave`: it ends when its thread does, and nobody waits for that.
template <class Object>
std::shared_ptr<Object> owner_of(std::shared_ptr<Object> object) {
  Object* const pointer = object.get();
  return {pointer, [object = std::move(object)](Object*) { object->leave(); }};
}

}  // namespace fold3d
