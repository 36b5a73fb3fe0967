// Pinned memory of the host, and copies that arrive late.
//
// Pages of a pinned block are protected while a copy is under way: nobody may write to the source
// of a copy to the device, and nobody may read or write the target of a copy to the host. An access
// of the host is a segmentation fault, which opens the pages and notes the fault.
#pragma once
#include <atomic>
#include <csignal>
#include <sys/mman.h>
#include "memory.h"

namespace late {

constexpr size_t PAGE = 4096;
constexpr int MOST_PINNED = 1 << 14;

struct Pages {  // of a pinned block; read by the signal's handler
  std::atomic<char*> base{nullptr};
  std::atomic<size_t> bytes{0};
  std::atomic<int> protection{PROT_READ | PROT_WRITE};
  std::atomic<bool> was_hit{false};
};
inline Pages pinned_pages[MOST_PINNED];

struct Copy {  // that is under way
  uint32_t number;
  int pages;
  bool to_host;
  at::Tensor on_host;   // kept alive until the copy is over, as torch's allocator does
  at::Tensor arriving;  // what a copy to the host brings
};
inline std::vector<Copy>& copies() {
  static auto* made = new std::vector<Copy>;
  return *made;
}

inline struct sigaction former_action;
inline void on_fault(int signal, siginfo_t* info, void* context) {
  char* at = static_cast<char*>(info->si_addr);
  for (Pages& pages : pinned_pages) {
    char* base = pages.base;
    if (!base || at < base || at >= base + pages.bytes) continue;
    if (pages.protection == (PROT_READ | PROT_WRITE)) break;
    pages.was_hit = true;
    mprotect(base, pages.bytes, PROT_READ | PROT_WRITE);
    return;
  }
  sigaction(signal, &former_action, nullptr);  // not ours: the access is repeated and fails
}
inline void watch_faults() {
  struct sigaction now;
  sigaction(SIGSEGV, nullptr, &now);
  if (now.sa_sigaction == on_fault) return;
  former_action = now;
  struct sigaction ours = {};
  ours.sa_sigaction = on_fault;
  ours.sa_flags = SA_SIGINFO | SA_NODEFER;
  sigaction(SIGSEGV, &ours, nullptr);
}

inline int pages_of(const void* address) {
  Block* block = block_of(address);
  return block ? block->pages : -1;
}
inline void protect(int index) {
  Pages& pages = pinned_pages[index];
  int wanted = PROT_READ | PROT_WRITE;
  for (const Copy& copy : copies())
    if (copy.pages == index) wanted = copy.to_host ? PROT_NONE : std::min(wanted, PROT_READ);
  pages.protection = wanted;
  if (wanted != (PROT_READ | PROT_WRITE)) watch_faults();
  mprotect(pages.base, pages.bytes, wanted);
}
inline void unprotect(int index) {
  Pages& pages = pinned_pages[index];
  pages.protection = PROT_READ | PROT_WRITE;
  mprotect(pages.base, pages.bytes, PROT_READ | PROT_WRITE);
}

// Find what the host has touched too early.
inline void find_hits() {
  for (size_t i = 0; i < copies().size(); ++i) {
    const Copy& copy = copies()[i];
    Pages& pages = pinned_pages[copy.pages];
    if (!pages.was_hit) continue;
    pages.was_hit = false;
    const std::string text = streams().text(copy.number);
    find(copy.to_host ? "host read before its copy was awaited: pinned memory that " + text + " fills"
                      : "pinned source changed before its copy was awaited: memory that " + text + " reads");
  }
}
// Let the device itself read and write a block: it sees what earlier copies bring, since its work
// has an order, though the host has waited for none of them. `protect` comes after it.
inline void bring_in_order(int index) {
  find_hits();
  unprotect(index);
  for (Copy& copy : copies())
    if (copy.pages == index && copy.to_host) copy.on_host.copy_(copy.arriving);
}
// Let copies arrive that the host has waited for.
inline void arrive() {
  find_hits();
  std::vector<Copy> over;
  for (size_t i = copies().size(); i-- > 0;)
    if (streams().is_over_for_host(copies()[i].number)) {
      over.push_back(std::move(copies()[i]));
      copies().erase(copies().begin() + i);
    }
  std::reverse(over.begin(), over.end());
  for (Copy& copy : over) {
    unprotect(copy.pages);
    if (copy.to_host) copy.on_host.copy_(copy.arriving);
  }
  for (Copy& copy : over) protect(copy.pages);
}

struct PinnedAllocator final : public c10::Allocator {
  static void free_(void* base) {
    Locked locked(streams().lock);
    int index = pages_of(base);
    remove_block(base);
    const size_t bytes = pinned_pages[index].bytes;
    pinned_pages[index].base = nullptr;
    munmap(base, bytes);
  }
  c10::DataPtr allocate(size_t n) override {
    Locked locked(streams().lock);
    const size_t bytes = (n / PAGE + 1) * PAGE;
    void* base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    int index = 0;
    while (index < MOST_PINNED && pinned_pages[index].base) ++index;
    TORCH_CHECK(base != MAP_FAILED && index < MOST_PINNED, "late_device: too much pinned memory");
    pinned_pages[index].bytes = bytes;
    pinned_pages[index].protection = PROT_READ | PROT_WRITE;
    pinned_pages[index].was_hit = false;
    pinned_pages[index].base = static_cast<char*>(base);
    Block block;
    block.base = static_cast<char*>(base);
    block.bytes = std::max<size_t>(n, 1);
    block.pages = index;
    memory().blocks[block.base] = std::move(block);
    return {base, base, &free_, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_; }
  void copy_data(void* to, const void* from, size_t n) const override { default_copy_data(to, from, n); }
};
inline PinnedAllocator pinned_allocator;

inline bool is_pinned(const void* address) {
  Locked locked(streams().lock);
  return pages_of(address) >= 0;
}

}  // namespace late
