// The words that ranks exchange beside their data: over TCP connections of their own, each message
// at once, none of them needed for progress.
//
// Keeps one invariant: nothing here blocks the caller, and a rank that died is told apart from a
// link that broke: only the former is a failure of the job.
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
  using Hear = std::function<void(const Message&)>;
  using Fail = std::function<void(const std::string&)>;

  /// Takes copies of the sockets, which are closed when nobody has the links any more.
  static std::shared_ptr<ControlLinks> make(const std::vector<Connection>& connections);
  ~ControlLinks() override;
  ControlLinks(const ControlLinks&) = delete;

  void start(Hear hear, Fail fail);
  void tell(int rank, const Message& message) override;
  void broadcast(const Message& message) override;
  /// Say goodbye, and hear nothing from then on.
  void close();
  /// Nobody has the links any more: say goodbye and end, without waiting for the thread.
  void leave();
  /// What went wrong without being a failure, in words, since the last call.
  std::vector<std::string> warnings();

 private:
  explicit ControlLinks(const std::vector<Connection>& connections);

  struct Peer {
    Connection connection;
    std::string outgoing, incoming;
    bool said_bye = false;
  };

  void run();
  void listen();
  void read(Peer& peer);
  void write(Peer& peer);  // under mutex_
  void lost(Peer& peer);
  void wake();

  const int process_;
  Hear hear_;
  Fail fail_;
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

/// Bytes of a message on the wire, and back; `read_message` takes a whole one off `bytes`' front.
std::string written(const Message& message);
bool read_message(std::string& bytes, Message& message);

}  // namespace fold3d
