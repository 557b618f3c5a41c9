#pragma once

#include <utility>

#include <c10/util/Exception.h>
#include <resilient/status.h>

namespace resilient {

// What a libtorch C++ program catches: torch's own classes, with our Status inside: its code, and
// who, where and since when in its detail(). what() begins with "[resilient:CODE]". Which code is
// of which class: docs/semantics.md section 5, where the second base is named; ConfigErrors are
// BackendErrors. Thread: immutable.
class BackendError : public c10::DistBackendError {
 public:
  BackendError(c10::SourceLocation where, Status status)
      : DistBackendError(where, status.ToString()), status_(std::move(status)) {}
  const Status& status() const { return status_; }

 private:
  Status status_;
};

class StoreError : public c10::DistStoreError {
 public:
  StoreError(c10::SourceLocation where, Status status)
      : DistStoreError(where, status.ToString()), status_(std::move(status)) {}
  const Status& status() const { return status_; }

 private:
  Status status_;
};

// A queue without an item, asked not to wait.
class QueueEmptyError : public c10::DistQueueEmptyError {
 public:
  QueueEmptyError(c10::SourceLocation where, Status status)
      : DistQueueEmptyError(where, status.ToString()), status_(std::move(status)) {}
  const Status& status() const { return status_; }

 private:
  Status status_;
};

class NetworkError : public c10::DistNetworkError {
 public:
  NetworkError(c10::SourceLocation where, Status status)
      : DistNetworkError(where, status.ToString()), status_(std::move(status)) {}
  const Status& status() const { return status_; }

 private:
  Status status_;
};

}  // namespace resilient
