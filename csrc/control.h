// Control messages between ranks, over TCP connections of their own. Each is sent at once, and none
// is needed for progress.
//
// Keeps one invariant: nothing here blocks the caller, and a dead rank is distinguished from a
// broken link: only the former is a failure of the job. A link that brings anything but messages
// counts as broken, and none is read for so long that others wait.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "scheduler.h"

namespace fold3d {

/// A connection that is open already; `address` and `port` are where the rank listens, and only
/// its death ends that.
struct Connection {
  int rank = 0;
  int socket = -1;
  std::string address;
  int port = 0;
};

class ControlLinks : public Peers {
 public:
  using OnMessage = std::function<void(const Message&)>;
  using OnFailure = std::function<void(const std::string&)>;

  /// Duplicates the sockets; the duplicates are closed when the last owner of the links is gone.
  static std::shared_ptr<ControlLinks> make(const std::vector<Connection>& connections);
  ~ControlLinks() override;
  ControlLinks(const ControlLinks&) = delete;

  void start(OnMessage on_message, OnFailure on_failure);
  void send_message(int rank, const Message& message) override;
  void broadcast(const Message& message) override;
  /// Send kClosing to all peers, wait for the thread, and receive nothing from then on.
  void close();
  /// The last owner is gone: send kClosing to all peers, and do not wait for the thread.
  void leave();
  /// Lost connections that are no failure, one sentence each, since the last call.
  std::vector<std::string> warnings();

 private:
  explicit ControlLinks(const std::vector<Connection>& connections);

  struct Peer {
    Connection connection;
    std::string outgoing, incoming;
    bool is_closing = false;
  };

  void run();
  void listen();
  void read(Peer& peer);
  void write(Peer& peer);  // under mutex_
  void connection_lost(Peer& peer, const std::string& why);
  void wake();

  const int process_;
  OnMessage on_message_;
  OnFailure on_failure_;
  std::mutex mutex_;
  std::map<int, Peer> peers_;
  std::vector<std::string> warnings_;
  std::condition_variable changed_;
  std::weak_ptr<ControlLinks> self_;
  std::thread::id thread_;
  bool runs_ = false;
  bool closing_ = false;
  int wake_ = -1;
};

/// The bytes of a message on the wire. `parse_message` is the inverse: it removes the first whole
/// message from `bytes`. `kNoMessage`: the bytes cannot be the beginning of one.
enum class Parsed { kIncomplete, kMessage, kNoMessage };
std::string serialize(const Message& message);
Parsed parse_message(std::string& bytes, Message& message);

}  // namespace fold3d
