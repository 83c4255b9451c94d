// Objects with a thread of their own, which any thread may release, also their own.
#pragma once

#include <memory>
#include <utility>

namespace fold3d {

/// A pointer to an object that its thread keeps alive. When the last copy is released, on whichever
/// thread, the object's `leave` is called: it ends with its thread, and no caller waits for that.
template <class Object>
std::shared_ptr<Object> owner_of(std::shared_ptr<Object> object) {
  Object* const pointer = object.get();
  return {pointer, [object = std::move(object)](Object*) { object->leave(); }};
}

}  // namespace fold3d
