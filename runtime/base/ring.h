#pragma once

#include <cstddef>
#include <utility>
#include <vector>

namespace resilient {

// A queue that keeps its memory: in a steady state nothing is allocated. A std::deque gives back a
// block and takes another one every few elements. T has a default; what is taken out is replaced by
// it at once. Thread: caller-synchronised.
template <typename T>
class Ring {
 public:
  bool empty() const { return size_ == 0; }
  std::size_t size() const { return size_; }
  T& operator[](std::size_t i) { return slots_[Slot(i)]; }
  const T& operator[](std::size_t i) const { return slots_[Slot(i)]; }
  T& front() { return (*this)[0]; }
  const T& front() const { return (*this)[0]; }
  T& back() { return (*this)[size_ - 1]; }

  T& push_back(T value) {
    if (size_ == slots_.size()) Grow();
    ++size_;
    back() = std::move(value);
    return back();
  }
  // REQUIRES: not empty.
  T pop_front() {
    T taken = std::exchange(front(), T());
    first_ = Slot(1);
    --size_;
    return taken;
  }

 private:
  // The size is a power of two.
  std::size_t Slot(std::size_t i) const { return (first_ + i) & (slots_.size() - 1); }
  void Grow() {
    std::vector<T> larger(slots_.empty() ? 8 : slots_.size() * 2);
    for (std::size_t i = 0; i < size_; ++i) larger[i] = std::move((*this)[i]);
    slots_ = std::move(larger);
    first_ = 0;
  }

  std::vector<T> slots_;
  std::size_t first_ = 0;
  std::size_t size_ = 0;
};

}  // namespace resilient
