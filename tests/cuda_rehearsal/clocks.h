// The order of work: vector clocks of the streams and of the host, and the accesses to memory that the
// clocks order. The work itself is done at once, in the order of the program.
#pragma once
#include <c10/core/Stream.h>
#include <c10/util/Exception.h>
#include <algorithm>
#include <array>
#include <chrono>
#include <csignal>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <sys/mman.h>
#include <unistd.h>
#include <utility>
#include <vector>

namespace rehearsal {

constexpr int kMostDevices = 8;
using Clock = std::vector<uint64_t>;  // for each stream: the time up to which its work is known to be done

struct Access {
  size_t begin, end;  // in bytes
  int stream;
  uint64_t time;  // on the stream's clock
  bool writes;
  std::string work;
};

struct Mark {  // an event
  Clock clock;
  std::chrono::steady_clock::time_point moment;
};

inline void join(Clock& clock, const Clock& other) {
  if (clock.size() < other.size()) clock.resize(other.size(), 0);
  for (size_t i = 0; i < other.size(); i++) clock[i] = std::max(clock[i], other[i]);
}

inline bool covers(const Clock& clock, const Access& access) {
  return size_t(access.stream) < clock.size() && clock[access.stream] >= access.time;
}

// Pinned host memory. It has whole pages, which the host may not touch while a copy is in progress.
struct Pinned {
  char* base;
  size_t size;
  std::vector<Access> accesses;
  bool freed = false;
};

struct Freed {  // freed device memory, which its stream may use again at once
  size_t size;
  std::vector<Access> accesses;
};

struct Board {  // one for the process
  std::mutex mutex;
  std::vector<Clock> streams;  // 0 to kMostDevices - 1: the default stream of each device
  Clock host;
  std::map<char*, Pinned> pinned;
  std::set<char*> busy;  // the keys of `pinned` with accesses in progress
  std::map<int, std::vector<Freed>> freed;
  long doubles = 0;  // the number of float64 elements that operations have made
  void (*on_wait)(const char*) = nullptr;
  std::array<long, kMostDevices> allocated{}, peak{};
  int devices = 1, own = -1;
  Board() { streams.resize(kMostDevices); }
};

inline Board& board() {
  static Board* it = new Board;  // never destroyed, because tensors may live longer than static objects
  return *it;
}

inline thread_local int current_device = 0;
inline thread_local std::array<int, kMostDevices> current_streams{0, 1, 2, 3, 4, 5, 6, 7};

inline int number_of(const c10::Stream& stream) {
  return stream.id() ? int(stream.id()) : int(stream.device_index());
}

inline c10::Stream stream_of(int number, int device) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(c10::DeviceType::CUDA, device),
                     number < kMostDevices ? 0 : number);
}

inline int new_stream() {
  std::lock_guard<std::mutex> lock(board().mutex);
  board().streams.emplace_back();
  return int(board().streams.size()) - 1;
}

// The following functions must be called with the mutex held.

inline uint64_t launch(int stream) {
  Clock& clock = board().streams[stream];
  join(clock, board().host);  // the launch comes after everything that the host has waited for
  if (clock.size() <= size_t(stream)) clock.resize(stream + 1, 0);
  return ++clock[stream];
}

inline void protect(Pinned& memory) {
  bool read = false, written = false;
  for (auto& a : memory.accesses) (a.writes ? written : read) = true;
  mprotect(memory.base, memory.size, written ? PROT_NONE : read ? PROT_READ : PROT_READ | PROT_WRITE);
}

inline void host_knows(const Clock& clock) {
  Board& b = board();
  join(b.host, clock);
  for (auto it = b.busy.begin(); it != b.busy.end();) {
    Pinned& memory = b.pinned.at(*it);
    auto& list = memory.accesses;
    list.erase(std::remove_if(list.begin(), list.end(), [&](auto& a) { return covers(b.host, a); }), list.end());
    protect(memory);
    if (!list.empty()) { ++it; continue; }
    it = b.busy.erase(it);
    if (memory.freed) { munmap(memory.base, memory.size); b.pinned.erase(memory.base); }
  }
}

// Records an access. Returns a message if the access is wrong, otherwise an empty text.
inline std::string touch(std::vector<Access>& known, Access access) {
  const Clock& now = board().streams[access.stream];
  std::string problem;
  for (auto& a : known) {
    bool meets = a.begin < access.end && access.begin < a.end && (a.writes || access.writes);
    if (meets && a.stream != access.stream && !covers(now, a)) {
      problem = c10::str("cuda rehearsal: ", access.work, " on stream ", access.stream,
                         access.writes ? " writes" : " reads", " memory that ", a.work, " on stream ", a.stream,
                         a.writes ? " writes" : " reads", ", and no event orders the two");
      break;
    }
  }
  auto past = [&](const Access& a) {
    if (covers(board().host, a)) return true;
    bool inside = access.begin <= a.begin && a.end <= access.end;
    return inside && covers(now, a) && (access.writes || (!a.writes && a.stream == access.stream));
  };
  known.erase(std::remove_if(known.begin(), known.end(), past), known.end());
  known.push_back(std::move(access));
  return problem;
}

// Checks that freed memory of the stream can be used again: no other stream may still be using it.
inline std::string reuse(int stream, size_t size) {
  auto found = board().freed.find(stream);
  if (found == board().freed.end() || found->second.empty()) return "";
  auto& list = found->second;
  const Clock& now = board().streams[stream];
  std::string problem;
  for (auto it = list.begin(); it != list.end();) {
    auto open = std::find_if(it->accesses.begin(), it->accesses.end(),
                             [&](auto& a) { return !covers(now, a) && !covers(board().host, a); });
    if (open == it->accesses.end()) { it = list.erase(it); continue; }
    if (problem.empty() && size && size <= it->size)
      problem = c10::str("cuda rehearsal: memory of stream ", stream, " is used again while ", open->work, " on stream ",
                         open->stream, " still uses it: record_stream is missing");
    ++it;
  }
  if (!problem.empty()) list.clear();  // one message is enough
  return problem;
}

// The following functions must be called without the mutex.

inline void waited(const char* what) {
  void (*tell)(const char*);
  {
    std::lock_guard<std::mutex> lock(board().mutex);
    tell = board().on_wait;
  }
  if (tell) tell(what);
}

inline void host_waits_for(int stream, const char* what) {
  {
    std::lock_guard<std::mutex> lock(board().mutex);
    Clock clock = board().streams[stream];
    host_knows(clock);
  }
  waited(what);
}

inline Pinned* pinned_at(const void* address) {
  auto it = board().pinned.upper_bound((char*)address);
  if (it == board().pinned.begin()) return nullptr;
  --it;
  return (char*)address < it->second.base + it->second.size ? &it->second : nullptr;
}

// The host touched protected memory. Print a message, then fail as without this handler.
inline struct sigaction before_us;
inline void on_fault(int, siginfo_t* info, void*) {
  if (pinned_at(info->si_addr)) {  // no lock is taken, because the process ends here
    const char text[] = "cuda rehearsal: the host touches pinned memory before the copy is done\n";
    if (write(2, text, sizeof text - 1)) {}
  }
  sigaction(SIGSEGV, &before_us, nullptr);
}
inline void watch_faults() {
  static bool watching = false;
  if (std::exchange(watching, true)) return;
  struct sigaction action {};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigaction(SIGSEGV, &action, &before_us);
}

}  // namespace rehearsal
