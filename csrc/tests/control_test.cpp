// Words over real sockets, and the difference between a rank that died and a link that broke.
#include <arpa/inet.h>
#include <sys/socket.h>
#include <unistd.h>

#include <future>
#include <utility>

#include "../control.h"
#include "check.h"

using namespace fold3d;

namespace {

struct Ear {
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<Message> heard;
  std::string failed;

  auto hear() {
    return [this](const Message& message) {
      std::lock_guard lock(mutex);
      heard.push_back(message);
      changed.notify_all();
    };
  }
  auto fail() {
    return [this](const std::string& error) {
      std::lock_guard lock(mutex);
      failed = error;
      changed.notify_all();
    };
  }
  template <class Claim>
  bool within_seconds(Claim claim) {
    std::unique_lock lock(mutex);
    return changed.wait_for(lock, std::chrono::seconds(10), claim);
  }
};

/// A listening socket of its own, and one connection between two ranks.
struct Wire {
  int listener, here, there, port;

  Wire() {
    listener = socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof address;
    CHECK(bind(listener, reinterpret_cast<sockaddr*>(&address), size) == 0);
    CHECK(listen(listener, 5) == 0);
    getsockname(listener, reinterpret_cast<sockaddr*>(&address), &size);
    port = ntohs(address.sin_port);
    here = socket(AF_INET, SOCK_STREAM, 0);
    CHECK(connect(here, reinterpret_cast<sockaddr*>(&address), size) == 0);
    there = accept(listener, nullptr, nullptr);
  }
  ~Wire() {
    close(here);
    close(there);
    if (listener >= 0) close(listener);
  }
  Connection to(int rank, int end) const { return {rank, end, "127.0.0.1", port}; }
};

void a_message_arrives_as_it_was_sent_in_pieces_too() {
  Message message{Message::kFailure, {3, 4, 1, 77}, 0.25, 0.5, "rank 3: out of memory"};
  std::string bytes, all = written(message) + written(message);
  Message read;
  for (std::size_t i = 0; i < all.size() / 2; ++i) {
    CHECK(!read_message(bytes, read));
    bytes.push_back(all[i]);
  }
  bytes += all.substr(all.size() / 2);
  for (int i = 0; i < 2; ++i) {
    CHECK(read_message(bytes, read));
    CHECK(read.kind == message.kind && read.text == message.text && read.eta_s == 0.25);
    CHECK(read.transfer.key() == message.transfer.key() && read.lease_s == 0.5);
  }
  CHECK(bytes.empty());
}

void ranks_hear_each_other() {
  Wire wire;
  Ear left, right;
  auto a = ControlLinks::make({wire.to(1, wire.here)});
  auto b = ControlLinks::make({wire.to(0, wire.there)});
  a->start(left.hear(), left.fail());
  b->start(right.hear(), right.fail());
  for (std::uint64_t i = 0; i < 100; ++i) a->tell(1, {Message::kEnd, {0, 1, 0, i}, 0, 0, {}});
  a->tell(7, {});  // no neighbour: nothing to say it with
  CHECK(right.within_seconds([&] { return right.heard.size() == 100; }));
  CHECK(right.heard[99].transfer.sequence == 99);
  b->close();
  a->close();
  CHECK(left.failed.empty() && a->warnings().empty());
}

void a_rank_that_died_is_a_failure() {
  Wire wire;
  Ear ear;
  auto links = ControlLinks::make({wire.to(5, wire.here)});
  links->start(ear.hear(), ear.fail());
  close(std::exchange(wire.listener, -1));
  shutdown(wire.there, SHUT_RDWR);
  CHECK(ear.within_seconds([&] { return !ear.failed.empty(); }));
  CHECK(ear.failed.starts_with("rank 5 has died"));
}

void a_link_that_broke_is_a_warning() {
  Wire wire;
  Ear ear;
  auto links = ControlLinks::make({wire.to(5, wire.here)});
  links->start(ear.hear(), ear.fail());
  shutdown(wire.there, SHUT_RDWR);
  std::vector<std::string> warnings;
  for (int i = 0; i < 1000 && warnings.empty(); ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    warnings = links->warnings();
  }
  CHECK(warnings.size() == 1 && warnings[0].find("rank 5 is lost") != std::string::npos);
  CHECK(ear.failed.empty());
  links->tell(5, {});  // goes nowhere
}

// What is said to the one who has it last may make it drop the links: it is on their thread.
void links_may_be_dropped_on_their_own_thread() {
  Wire wire;
  Ear ear;
  auto links = ControlLinks::make({wire.to(1, wire.here)});
  close(std::exchange(wire.here, -1));  // links have a copy, which they close
  std::promise<void> given;
  links->start([&](const Message& message) {
    given.get_future().wait();
    links.reset();
    ear.hear()(message);
  }, ear.fail());
  given.set_value();
  const std::string word = written({Message::kWanted, {1, 0, 0, 0}, 0, 0, {}});
  CHECK(send(wire.there, word.data(), word.size(), 0) == static_cast<ssize_t>(word.size()));
  CHECK(ear.within_seconds([&] { return ear.heard.size() == 1; }));
  char goodbye[256];
  while (recv(wire.there, goodbye, sizeof goodbye, 0) > 0) {  // until the socket is closed
  }
}

}  // namespace

int main() {
  RUN(a_message_arrives_as_it_was_sent_in_pieces_too);
  RUN(ranks_hear_each_other);
  RUN(a_rank_that_died_is_a_failure);
  RUN(a_link_that_broke_is_a_warning);
  RUN(links_may_be_dropped_on_their_own_thread);
}
