#pragma once

#include <memory>

namespace resilient::store {

template <typename T>
inline const T kUnwritten{};

// A T that most of its owners never write: it takes a pointer until one does, and reads as T{}.
// For arrays with an element for each rank of a large world. Thread: value type that can only be
// moved.
template <typename T>
class Seldom {
 public:
  const T& operator*() const { return value_ ? *value_ : kUnwritten<T>; }
  const T* operator->() const { return &**this; }
  // To write to it.
  T& Make() {
    if (!value_) value_ = std::make_unique<T>();
    return *value_;
  }

 private:
  std::unique_ptr<T> value_;
};

}  // namespace resilient::store
