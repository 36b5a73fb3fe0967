// What has happened before what, on a device whose streams run late.
//
// A stream's work is numbered: its ticks. A clock says for every stream how many of its ticks are
// over. A stream has a clock (what is over before its next operation), an event has one (what was
// over, or before it in its stream, when it was recorded), and the host has one (what it has waited
// for). An operation is launched with what its stream knows and what the host knows. Nothing else
// orders two operations, however long ago the first one was launched.
#pragma once
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

namespace late {

using Clock = std::vector<uint32_t>;

inline void join(Clock& into, const Clock& other) {
  if (into.size() < other.size()) into.resize(other.size(), 0);
  for (size_t i = 0; i < other.size(); ++i) into[i] = std::max(into[i], other[i]);
}

inline bool covers(const Clock& clock, int stream, uint32_t tick) {
  return static_cast<size_t>(stream) < clock.size() && clock[stream] >= tick;
}

struct Launch {
  int stream;
  uint32_t tick;
  std::string what;  // the operation, with the shape of its first tensor
};

struct Event {
  Clock clock;
  double seconds = 0;
  bool is_recorded = false;
  bool was_asked = false;
};

constexpr int MOST_STREAMS = 2048;  // then streams are used again, in turn, as CUDA does after 32

struct Streams {
  std::recursive_mutex lock;         // of everything of the device
  std::vector<Clock> clocks{Clock{}};  // by stream; 0 is the default one
  Clock host;
  std::vector<Launch> launches{Launch{0, 0, "nothing"}};
  int64_t made = 0;

  int add() {
    if (clocks.size() < MOST_STREAMS) {
      clocks.emplace_back();
      return static_cast<int>(clocks.size()) - 1;
    }
    return 1 + static_cast<int>(made++ % (MOST_STREAMS - 1));
  }
  // Launch an operation, and return its number.
  uint32_t launch(int stream, std::string what) {
    Clock& clock = clocks[stream];
    join(clock, host);
    if (clock.size() <= static_cast<size_t>(stream)) clock.resize(stream + 1, 0);
    launches.push_back({stream, ++clock[stream], std::move(what)});
    return static_cast<uint32_t>(launches.size()) - 1;
  }
  bool is_over_for(int stream, uint32_t number) const {
    const Launch& one = launches[number];
    return one.tick == 0 || one.stream == stream || covers(clocks[stream], one.stream, one.tick) ||
           covers(host, one.stream, one.tick);
  }
  bool is_over_for_host(uint32_t number) const {
    const Launch& one = launches[number];
    return covers(host, one.stream, one.tick);
  }
  bool host_has(const Clock& clock) const {
    for (size_t i = 0; i < clock.size(); ++i)
      if (clock[i] && !covers(host, static_cast<int>(i), clock[i])) return false;
    return true;
  }
  std::string text(uint32_t number) const {
    return launches[number].what + " on stream " + std::to_string(launches[number].stream);
  }
};

inline Streams& streams() {
  static auto* made = new Streams;  // never ended: tensors outlive it otherwise
  return *made;
}

using Locked = std::lock_guard<std::recursive_mutex>;
inline thread_local int current_stream = 0;

inline double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace late
