// Blocks of memory, and who has read and written each two bytes of them.
#pragma once
#include <map>
#include <set>
#include <stdexcept>
#include <ATen/core/Tensor.h>
#include "clocks.h"

namespace late {

constexpr size_t CELL = 2;  // bytes

// The launch that last read or wrote each cell: one number for all of them, until they differ.
struct Marks {
  uint32_t all = 0;
  std::vector<uint32_t> each;

  void set(size_t from, size_t to, size_t cells, uint32_t number) {
    if (from == 0 && to >= cells) {
      all = number;
      each.clear();
      return;
    }
    if (each.empty()) each.assign(cells, all);
    std::fill(each.begin() + from, each.begin() + std::min(to, cells), number);
  }
  // Return the first number of these cells that fails a test; 0 if none does.
  template <typename Test>
  uint32_t first(size_t from, size_t to, Test fails) const {
    if (each.empty()) return all && fails(all) ? all : 0;
    uint32_t seen = 0;
    for (size_t i = from; i < std::min(to, each.size()); ++i)
      if (each[i] != seen && (seen = each[i]) && fails(seen)) return seen;
    return 0;
  }
};

struct Block {
  char* base = nullptr;
  size_t bytes = 0;
  int stream = -1;                          // that it was allocated on
  Marks written;
  std::map<int, Marks> read;           // by stream
  std::map<int, uint32_t> last_use;    // by stream
  std::set<int> recorded;              // streams given to record_stream
  int pages = -1;                      // of a pinned block, whose stream is -1
  size_t cells() const { return (bytes + CELL - 1) / CELL; }
};

struct Freed {
  uint32_t use;  // a launch on another stream, which was not over for the stream that allocated
  size_t bytes;
};

struct Memory {
  std::map<char*, Block> blocks;
  std::map<int, std::vector<Freed>> freed;  // by the stream that allocated
  std::vector<std::string> findings;        // all, in order
  size_t raised = 0;                        // findings that some operation has raised
  size_t allocated = 0, peak = 0;
};

inline Memory& memory() {
  static auto* made = new Memory;
  return *made;
}

// Raise what was found. Where nothing can be raised the next operation does it.
inline void find(std::string text) {
  auto& findings = memory().findings;
  if (findings.empty() || findings.back() != text) findings.push_back(std::move(text));
}
inline void raise_findings() {
  Memory& m = memory();
  if (m.raised == m.findings.size()) return;
  std::string text = m.findings[m.raised];
  m.raised = m.findings.size();
  TORCH_CHECK(false, "late_device: ", text);
}

inline size_t rounded(size_t bytes) { return (bytes + 511) / 512 * 512; }

// A new tensor on the current stream may get what was allocated there and freed.
inline void check_freed(int stream) {
  auto& list = memory().freed[stream];
  for (const Freed& one : list)
    if (!streams().is_over_for(stream, one.use))
      find("early reuse: " + std::to_string(one.bytes) + " bytes that " + streams().text(one.use) +
           " uses were allocated on stream " + std::to_string(stream) +
           " and freed, and a new tensor of that stream may be given them: record_stream or a wait "
           "is missing");
  list.clear();
}

inline void add_block(void* base, size_t bytes) {
  if (!base) return;
  check_freed(current_stream);
  Memory& m = memory();
  Block block;
  block.base = static_cast<char*>(base);
  block.bytes = bytes;
  block.stream = current_stream;
  m.blocks[block.base] = std::move(block);
  m.allocated += rounded(bytes);
  m.peak = std::max(m.peak, m.allocated);
}

inline void remove_block(void* base) {
  Memory& m = memory();
  auto at = m.blocks.find(static_cast<char*>(base));
  if (at == m.blocks.end()) return;
  Block& block = at->second;
  if (block.pages >= 0) {
    m.blocks.erase(at);
    return;
  }
  for (auto& [stream, number] : block.last_use)
    if (!streams().is_over_for(block.stream, number) && !block.recorded.count(stream))
      m.freed[block.stream].push_back({number, block.bytes});
  m.allocated -= rounded(block.bytes);
  m.blocks.erase(at);
}

inline Block* block_of(const void* address) {
  auto& blocks = memory().blocks;
  auto at = blocks.upper_bound(static_cast<char*>(const_cast<void*>(address)));
  if (at == blocks.begin()) return nullptr;
  Block& block = (--at)->second;
  return address < block.base + block.bytes ? &block : nullptr;
}

// Note that a launch reads or writes some bytes of a block, and find what does not come before it.
inline void touch(Block& block, size_t byte, size_t bytes, uint32_t number, bool writes) {
  Streams& s = streams();
  const int stream = s.launches[number].stream;
  const size_t from = byte / CELL, to = (byte + bytes + CELL - 1) / CELL, cells = block.cells();
  auto fails = [&](uint32_t other) { return !s.is_over_for(stream, other); };
  auto found = [&](uint32_t other, const char* does, const char* did) {
    find("missing wait: " + s.text(number) + " " + does + " what " + s.text(other) + " " + did +
         ", and nothing makes the second stream's work come before the first one's");
  };
  uint32_t other = block.written.first(from, to, fails);
  if (other) found(other, writes ? "writes" : "reads", "writes");
  if (writes && !other)
    for (auto& [reader, marks] : block.read)
      if (reader != stream && (other = marks.first(from, to, fails))) {
        found(other, "writes", "reads");
        break;
      }
  if (writes) {
    block.written.set(from, to, cells, number);
    if (from == 0 && to >= cells) block.read.clear();
  } else {
    block.read[stream].set(from, to, cells, number);
  }
  block.last_use[stream] = number;
}

// Call f(byte, bytes) for every contiguous piece of a tensor's storage that the tensor covers.
template <typename F>
void pieces(const at::Tensor& x, F f) {
  if (x.numel() == 0) return;
  const int64_t item = x.itemsize();
  std::vector<std::pair<int64_t, int64_t>> dims;  // (stride in bytes, size), smallest stride first
  for (int64_t d = 0; d < x.dim(); ++d)
    if (x.size(d) > 1 && x.stride(d) != 0) dims.emplace_back(x.stride(d) * item, x.size(d));
  std::sort(dims.begin(), dims.end());
  int64_t piece = item;
  size_t first = 0;
  while (first < dims.size() && dims[first].first == piece) piece *= dims[first++].second;
  std::vector<int64_t> at(dims.size(), 0);
  int64_t byte = x.storage_offset() * item;
  while (true) {
    f(static_cast<size_t>(byte), static_cast<size_t>(piece));
    size_t d = first;
    for (; d < dims.size(); ++d) {
      byte += dims[d].first;
      if (++at[d] < dims[d].second) break;
      byte -= dims[d].first * dims[d].second;
      at[d] = 0;
    }
    if (d == dims.size()) return;
  }
}

inline void touch(const at::Tensor& x, uint32_t number, bool writes) {
  if (!x.defined() || x.numel() == 0 || !x.has_storage()) return;
  char* data = static_cast<char*>(x.storage().mutable_data());
  Block* block = block_of(data);
  if (!block) return;
  const size_t offset = data - block->base;
  pieces(x, [&](size_t byte, size_t bytes) { touch(*block, offset + byte, bytes, number, writes); });
}

}  // namespace late
