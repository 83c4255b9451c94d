// Control messages over real sockets, and a dead rank against a broken link.
#include <arpa/inet.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <future>
#include <utility>

#include "../control.h"
#include "check.h"

using namespace fold3d;

namespace {

struct Received {
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<Message> messages;
  std::string failed;

  auto on_message() {
    return [this](const Message& message) {
      std::lock_guard lock(mutex);
      messages.push_back(message);
      changed.notify_all();
    };
  }
  auto on_failure() {
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
  std::string bytes, all = serialize(message) + serialize(message);
  Message read;
  for (std::size_t i = 0; i < all.size() / 2; ++i) {
    CHECK(parse_message(bytes, read) == Parsed::kIncomplete);
    bytes.push_back(all[i]);
  }
  bytes += all.substr(all.size() / 2);
  for (int i = 0; i < 2; ++i) {
    CHECK(parse_message(bytes, read) == Parsed::kMessage);
    CHECK(read.kind == message.kind && read.text == message.text && read.eta_s == 0.25);
    CHECK(read.transfer.key() == message.transfer.key() && read.lease_s == 0.5);
  }
  CHECK(bytes.empty());
}

void messages_arrive_in_order() {
  Wire wire;
  Received left, right;
  auto a = ControlLinks::make({wire.to(1, wire.here)});
  auto b = ControlLinks::make({wire.to(0, wire.there)});
  a->start(left.on_message(), left.on_failure());
  b->start(right.on_message(), right.on_failure());
  for (std::uint64_t i = 0; i < 100; ++i)
    a->send_message(1, {Message::kTransferDone, {0, 1, 0, i}, 0, 0, {}});
  a->send_message(7, {});  // no neighbour: dropped
  CHECK(right.within_seconds([&] { return right.messages.size() == 100; }));
  CHECK(right.messages[99].transfer.sequence == 99);
  b->close();
  a->close();
  CHECK(left.failed.empty() && a->warnings().empty());
}

void a_rank_that_died_is_a_failure() {
  Wire wire;
  Received received;
  auto links = ControlLinks::make({wire.to(5, wire.here)});
  links->start(received.on_message(), received.on_failure());
  close(std::exchange(wire.listener, -1));
  shutdown(wire.there, SHUT_RDWR);
  CHECK(received.within_seconds([&] { return !received.failed.empty(); }));
  CHECK(received.failed.starts_with("rank 5 has died"));
}

void a_link_that_broke_is_a_warning() {
  Wire wire;
  Received received;
  auto links = ControlLinks::make({wire.to(5, wire.here)});
  links->start(received.on_message(), received.on_failure());
  shutdown(wire.there, SHUT_RDWR);
  std::vector<std::string> warnings;
  for (int i = 0; i < 1000 && warnings.empty(); ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    warnings = links->warnings();
  }
  CHECK(warnings.size() == 1 && warnings[0].find("rank 5 is lost") != std::string::npos);
  CHECK(received.failed.empty());
  links->send_message(5, {});  // goes nowhere
}

std::string warning_of(ControlLinks& links) {
  for (int i = 0; i < 1000; ++i) {
    if (auto warnings = links.warnings(); !warnings.empty()) return warnings.front();
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return "";
}

void what_is_no_message_ends_the_link_and_not_the_job() {
  const std::string good = serialize({Message::kTransferDone, {1, 0, 0, 0}, 0, 0, {}});
  std::vector<std::string> bad(5, good);
  bad[0] = "GET / HTTP/1.1\r\nHost: rank0\r\nAccept: */*\r\nUser-Agent: a scanner\r\n\r\n";
  bad[1].replace(0, 4, "\xff\xff\xff\x7f", 4);   // it would be 2 GiB long
  bad[2].replace(0, 4, std::string(4, '\0'));     // shorter than its header
  bad[3][4] = 99;                                  // of no kind
  bad[4].replace(bad[4].size() - 8, 8, std::string(8, '\xff'));  // not a number of seconds
  for (const std::string& bytes : bad) {
    Wire wire;
    Received received;
    auto links = ControlLinks::make({wire.to(5, wire.here)});
    links->start(received.on_message(), received.on_failure());
    const std::string all = good + bytes + good;
    CHECK(send(wire.there, all.data(), all.size(), 0) == static_cast<ssize_t>(all.size()));
    CHECK(warning_of(*links).find("rank 5 is lost, as something else") != std::string::npos);
    links->close();
    CHECK(received.messages.size() == 1 && received.failed.empty());
  }
}

// A link that never pauses is read in turn with the others, and does not keep links from closing.
void a_flood_does_not_delay_other_links() {
  Wire loud, quiet;
  Received received;
  auto links = ControlLinks::make({loud.to(1, loud.here), quiet.to(2, quiet.here)});
  std::atomic<bool> over{false};
  std::atomic<int> of_quiet{0};
  links->start([&](const Message& message) { of_quiet += message.transfer.sender == 2; },
               received.on_failure());
  std::thread flood([&] {
    std::string bytes;
    for (int i = 0; i < 1000; ++i)
      bytes += serialize({Message::kReceiverWaiting, {1, 0, 0, 0}, 0, 0, {}});
    while (!over && send(loud.there, bytes.data(), bytes.size(), MSG_NOSIGNAL) > 0) {
    }
  });
  const std::string message = serialize({Message::kTransferDone, {2, 0, 0, 0}, 0, 0, {}});
  for (int i = 0; i < 20; ++i) {
    const ssize_t sent = send(quiet.there, message.data(), message.size(), 0);
    CHECK(sent == static_cast<ssize_t>(message.size()));
    for (int waited = 0; of_quiet <= i && waited < 10000; ++waited)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    CHECK(of_quiet == i + 1);
  }
  links->close();
  over = true;
  links.reset();
  shutdown(loud.there, SHUT_RDWR);
  flood.join();
  CHECK(received.failed.empty());
}

// A message may make the last owner release the links: on their own thread.
void links_may_be_dropped_on_their_own_thread() {
  Wire wire;
  Received received;
  auto links = ControlLinks::make({wire.to(1, wire.here)});
  close(std::exchange(wire.here, -1));  // links have a copy, which they close
  std::promise<void> given;
  links->start([&](const Message& message) {
    given.get_future().wait();
    links.reset();
    received.on_message()(message);
  }, received.on_failure());
  given.set_value();
  const std::string bytes = serialize({Message::kReceiverWaiting, {1, 0, 0, 0}, 0, 0, {}});
  CHECK(send(wire.there, bytes.data(), bytes.size(), 0) == static_cast<ssize_t>(bytes.size()));
  CHECK(received.within_seconds([&] { return received.messages.size() == 1; }));
  char goodbye[256];
  while (recv(wire.there, goodbye, sizeof goodbye, 0) > 0) {  // until the socket is closed
  }
}

}  // namespace

int main() {
  RUN(a_message_arrives_as_it_was_sent_in_pieces_too);
  RUN(messages_arrive_in_order);
  RUN(a_rank_that_died_is_a_failure);
  RUN(a_link_that_broke_is_a_warning);
  RUN(what_is_no_message_ends_the_link_and_not_the_job);
  RUN(a_flood_does_not_delay_other_links);
  RUN(links_may_be_dropped_on_their_own_thread);
}
