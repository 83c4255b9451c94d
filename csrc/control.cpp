#include "control.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <cstring>
#include <utility>

namespace fold3d {
namespace {

constexpr std::size_t kMaxOutgoing = 1 << 16;  // bytes to a peer that does not read
constexpr std::size_t kMaxText = 4000;
constexpr std::size_t kMaxTurn = 1 << 16;  // bytes of one peer, before the others' turn
constexpr int kProbeTimeout_ms = 1000;

struct Header {
  std::uint32_t num_bytes;  // of header and text
  std::uint8_t kind, direction;
  std::int32_t sender, receiver;
  std::uint64_t sequence;
  double eta_s, lease_s;
};

// Whether the peer's process lives: as long as it does, its socket listens.
enum class PeerState { kAlive, kDead, kUnknown };

PeerState probe(const Connection& connection) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<std::uint16_t>(connection.port));
  if (inet_pton(AF_INET, connection.address.c_str(), &address.sin_addr) != 1)
    return PeerState::kUnknown;
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (fd < 0) return PeerState::kUnknown;
  PeerState state = PeerState::kUnknown;
  if (connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0) {
    state = PeerState::kAlive;
  } else if (errno == ECONNREFUSED) {
    state = PeerState::kDead;
  } else if (errno == EINPROGRESS) {
    pollfd waiting{fd, POLLOUT, 0};
    int error = 0;
    socklen_t size = sizeof error;
    if (poll(&waiting, 1, kProbeTimeout_ms) == 1 &&
        getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size) == 0)
      state = error == 0              ? PeerState::kAlive
              : error == ECONNREFUSED ? PeerState::kDead
                                      : PeerState::kUnknown;
  }
  ::close(fd);
  return state;
}

}  // namespace

std::string serialize(const Message& message) {
  Header header{};
  const std::string text = message.text.substr(0, kMaxText);
  header.num_bytes = static_cast<std::uint32_t>(sizeof header + text.size());
  header.kind = message.kind;
  header.direction = static_cast<std::uint8_t>(message.transfer.direction);
  header.sender = message.transfer.sender;
  header.receiver = message.transfer.receiver;
  header.sequence = message.transfer.sequence;
  header.eta_s = message.eta_s;
  header.lease_s = message.lease_s;
  return std::string(reinterpret_cast<const char*>(&header), sizeof header) + text;
}

Parsed parse_message(std::string& bytes, Message& message) {
  Header header{};
  if (bytes.size() < sizeof header) return Parsed::kIncomplete;
  std::memcpy(&header, bytes.data(), sizeof header);
  if (header.num_bytes < sizeof header || header.num_bytes > sizeof header + kMaxText ||
      header.kind < Message::kTransfer || header.kind > Message::kReceiverWaiting ||
      !std::isfinite(header.eta_s) || !std::isfinite(header.lease_s))
    return Parsed::kNoMessage;
  if (bytes.size() < header.num_bytes) return Parsed::kIncomplete;
  message.kind = static_cast<Message::Kind>(header.kind);
  message.transfer = {header.sender, header.receiver, header.direction, header.sequence};
  message.eta_s = header.eta_s;
  message.lease_s = header.lease_s;
  message.text = bytes.substr(sizeof header, header.num_bytes - sizeof header);
  bytes.erase(0, header.num_bytes);
  return Parsed::kMessage;
}

std::shared_ptr<ControlLinks> ControlLinks::make(const std::vector<Connection>& connections) {
  std::shared_ptr<ControlLinks> links(new ControlLinks(connections));
  links->self_ = links;
  return owner_of(std::move(links));
}

ControlLinks::ControlLinks(const std::vector<Connection>& connections) : process_(getpid()) {
  wake_ = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  for (const Connection& given : connections) {
    Peer& peer = peers_[given.rank];
    peer.connection = given;
    peer.connection.socket = fcntl(given.socket, F_DUPFD_CLOEXEC, 0);
    const int one = 1, low_delay = 0x10;
    setsockopt(peer.connection.socket, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    setsockopt(peer.connection.socket, IPPROTO_IP, IP_TOS, &low_delay, sizeof low_delay);
    fcntl(peer.connection.socket, F_SETFL, O_NONBLOCK);
  }
}

ControlLinks::~ControlLinks() {
  for (auto& [_, peer] : peers_)
    if (peer.connection.socket >= 0) ::close(peer.connection.socket);
  ::close(wake_);
}

void ControlLinks::start(OnMessage on_message, OnFailure on_failure) {
  on_message_ = std::move(on_message);
  on_failure_ = std::move(on_failure);
  runs_ = true;
  std::thread([self = self_.lock()] { self->run(); }).detach();
}

void ControlLinks::send_message(int rank, const Message& message) {
  std::lock_guard lock(mutex_);
  auto found = peers_.find(rank);
  if (found == peers_.end() || found->second.connection.socket < 0) return;
  if (found->second.outgoing.size() > kMaxOutgoing) return;  // lost; leases make up for it
  found->second.outgoing += serialize(message);
  write(found->second);
}

void ControlLinks::broadcast(const Message& message) {
  std::lock_guard lock(mutex_);
  for (auto& [_, peer] : peers_) {
    if (peer.connection.socket < 0) continue;
    peer.outgoing += serialize(message);
    write(peer);
  }
}

void ControlLinks::close() {
  leave();
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return !runs_ || std::this_thread::get_id() == thread_; });
}

void ControlLinks::leave() {
  if (getpid() != process_) return;  // a fork's copy: its parent has the thread
  Message closing;
  closing.kind = Message::kClosing;
  broadcast(closing);
  {
    std::lock_guard lock(mutex_);
    closing_ = true;
  }
  wake();
}

std::vector<std::string> ControlLinks::warnings() {
  std::lock_guard lock(mutex_);
  return std::exchange(warnings_, {});
}

void ControlLinks::run() {
  {
    std::lock_guard lock(mutex_);
    thread_ = std::this_thread::get_id();
  }
  listen();
  on_message_ = {};
  on_failure_ = {};
  std::lock_guard lock(mutex_);
  runs_ = false;
  changed_.notify_all();
}

void ControlLinks::listen() {
  std::vector<pollfd> watched;
  std::vector<int> ranks;
  while (true) {
    watched = {{wake_, POLLIN, 0}};
    ranks = {-1};
    {
      std::lock_guard lock(mutex_);
      if (closing_) return;
      for (auto& [rank, peer] : peers_) {
        if (peer.connection.socket < 0) continue;
        const short events = peer.outgoing.empty() ? POLLIN : POLLIN | POLLOUT;
        watched.push_back({peer.connection.socket, events, 0});
        ranks.push_back(rank);
      }
    }
    poll(watched.data(), watched.size(), 1000);
    std::uint64_t count;
    while (::read(wake_, &count, sizeof count) > 0) {
    }
    for (std::size_t i = 1; i < watched.size(); ++i) {
      Peer& peer = peers_.at(ranks[i]);
      if (watched[i].revents & POLLOUT) {
        std::lock_guard lock(mutex_);
        write(peer);
      }
      if (watched[i].revents & (POLLIN | POLLERR | POLLHUP)) read(peer);
    }
  }
}

void ControlLinks::read(Peer& peer) {
  char buffer[4096];
  ssize_t count = 1;
  for (std::size_t taken = 0; taken < kMaxTurn; taken += static_cast<std::size_t>(count)) {
    count = recv(peer.connection.socket, buffer, sizeof buffer, 0);
    if (count <= 0) break;
    peer.incoming.append(buffer, static_cast<std::size_t>(count));
  }
  const bool ended = count == 0 || (count < 0 && errno != EAGAIN && errno != EINTR);
  Message message;
  Parsed parsed;
  while ((parsed = parse_message(peer.incoming, message)) == Parsed::kMessage) {
    peer.is_closing |= message.kind == Message::kClosing;
    on_message_(message);
  }
  if (parsed == Parsed::kNoMessage)
    connection_lost(peer, ", as something else than messages came through it");
  else if (ended)
    connection_lost(peer, "");
}

void ControlLinks::write(Peer& peer) {
  while (!peer.outgoing.empty()) {
    const ssize_t count = ::send(peer.connection.socket, peer.outgoing.data(),
                                 peer.outgoing.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (count <= 0) break;  // full, or broken: then reading says so
    peer.outgoing.erase(0, static_cast<std::size_t>(count));
  }
  if (!peer.outgoing.empty()) wake();
}

void ControlLinks::connection_lost(Peer& peer, const std::string& why) {
  {
    std::lock_guard lock(mutex_);
    ::close(peer.connection.socket);
    peer.connection.socket = -1;
    if (closing_) return;
  }
  if (peer.is_closing) return;
  const std::string who = "rank " + std::to_string(peer.connection.rank);
  if (probe(peer.connection) == PeerState::kDead) {
    on_failure_(who + " has died: nothing listens at " + peer.connection.address + ":" +
          std::to_string(peer.connection.port) + " any more");
    return;
  }
  std::lock_guard lock(mutex_);
  warnings_.push_back("the control connection to " + who + " is lost" + why +
                      ": its transfers are no longer waited for, DP.sync is only sliced");
}

void ControlLinks::wake() {
  const std::uint64_t one = 1;
  [[maybe_unused]] auto ignored = ::write(wake_, &one, sizeof one);
}

}  // namespace fold3d
