#pragma once

#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include <resilient/clock.h>
#include <resilient/rendezvous.h>
#include <resilient/status.h>

#include "store/core/messages.h"

// How the values of rows are written: field after field, numbers in groups of seven bits, lowest
// first, a text behind its length. What a row consists of is said once, by a function template
// Fields(archive, value) that serves RowWriter and RowReader alike, so that the two cannot differ.
// kRowFormat says which fields there are; it is kept in the store's own row.
namespace resilient::store {

inline constexpr std::uint64_t kRowFormat = 8;

// Thread: value type on the stack.
class RowWriter {
 public:
  template <typename... Field>
  void operator()(const Field&... fields) {
    (Put(fields), ...);
  }
  template <typename E>
  void Enum(const E& value, E /*last*/) {
    PutNumber(static_cast<std::uint64_t>(value));
  }
  std::string Take() { return std::move(bytes_); }

 private:
  void PutNumber(std::uint64_t number) {
    for (; number >= 0x80; number >>= 7) bytes_ += static_cast<char>((number & 0x7f) | 0x80);
    bytes_ += static_cast<char>(number);
  }
  template <typename T>
  void Put(const T& value) {
    if constexpr (std::same_as<T, double>) {
      PutNumber(std::bit_cast<std::uint64_t>(value));
    } else if constexpr (std::is_integral_v<T>) {
      PutNumber(static_cast<std::uint64_t>(value));
    } else {
      // One description of the fields for both ways; the writer changes none of them.
      Fields(*this, const_cast<T&>(value));
    }
  }
  void Put(const std::string& text) {
    PutNumber(text.size());
    bytes_ += text;
  }
  void Put(const Duration& duration) { Put(duration.count()); }
  void Put(const Status& status) {
    Enum(status.code(), StatusCode::kInternal);
    if (!status.ok()) (*this)(status.message(), status.detail());
  }
  template <typename T>
  void Put(const std::vector<T>& values) {
    PutNumber(values.size());
    for (const T& value : values) Put(value);
  }
  template <typename T>
  void Put(const std::optional<T>& value) {
    Put(value.has_value());
    if (value) Put(*value);
  }

  std::string bytes_;
};

// Never reads beyond the row, whatever it holds; after the first thing that does not fit nothing is
// read any more. Thread: value type on the stack.
class RowReader {
 public:
  explicit RowReader(std::string_view row) : rest_(row) {}

  template <typename... Field>
  void operator()(Field&... fields) {
    (Get(fields), ...);
  }
  template <typename E>
  void Enum(E& value, E last) {
    const std::uint64_t number = GetNumber();
    if (number > static_cast<std::uint64_t>(last)) return Fail();
    value = static_cast<E>(number);
  }
  // Everything was there, and nothing else.
  bool Done() const { return ok_ && rest_.empty(); }

 private:
  void Fail() {
    ok_ = false;
    rest_ = {};
  }
  std::uint64_t GetNumber() {
    std::uint64_t number = 0;
    for (unsigned shift = 0; shift < 64; shift += 7) {
      if (rest_.empty()) break;
      const auto byte = static_cast<unsigned char>(rest_.front());
      rest_.remove_prefix(1);
      number |= static_cast<std::uint64_t>(byte & 0x7f) << shift;
      if (byte < 0x80) return number;
    }
    Fail();
    return 0;
  }
  template <typename T>
  void Get(T& value) {
    if constexpr (std::same_as<T, bool>) {
      value = GetNumber() != 0;
    } else if constexpr (std::same_as<T, double>) {
      value = std::bit_cast<double>(GetNumber());
    } else if constexpr (std::is_integral_v<T>) {
      value = static_cast<T>(GetNumber());
    } else {
      Fields(*this, value);
    }
  }
  void Get(std::string& text) {
    const std::uint64_t size = GetNumber();
    if (size > rest_.size()) return Fail();
    text = rest_.substr(0, size);
    rest_.remove_prefix(size);
  }
  void Get(Duration& duration) {
    Duration::rep count = 0;
    Get(count);
    duration = Duration(count);
  }
  void Get(Status& status) {
    StatusCode code = StatusCode::kOk;
    Enum(code, StatusCode::kInternal);
    status = Status();
    if (code == StatusCode::kOk) return;
    std::string message;
    FailureDetail detail;
    (*this)(message, detail);
    status = Status(code, std::move(message), std::move(detail));
  }
  template <typename T>
  void Get(std::vector<T>& values) {
    const std::uint64_t size = GetNumber();
    if (size > rest_.size()) return Fail();  // Each takes a byte at least.
    values.resize(size);
    for (T& value : values) Get(value);
  }
  template <typename T>
  void Get(std::optional<T>& value) {
    bool there = false;
    Get(there);
    value.reset();
    if (there) Get(value.emplace());
  }

  std::string_view rest_;
  bool ok_ = true;
};

template <typename T>
std::string EncodeRow(const T& value) {
  RowWriter writer;
  writer(value);
  return writer.Take();
}

// False: not what EncodeRow wrote; `value` is then of no use.
template <typename T>
bool DecodeRow(std::string_view row, T& value) {
  RowReader reader(row);
  reader(value);
  return reader.Done();
}

template <typename Archive>
void Fields(Archive& archive, FailureDetail& detail) {
  archive(detail.rank, detail.host, detail.pid, detail.generation, detail.group, detail.seq,
          detail.since_unix_s);
}

template <typename Archive>
void Fields(Archive& archive, ProcessIdentity& process) {
  archive(process.host, process.boot_id, process.pid_namespace, process.pid, process.start_time);
}

template <typename Archive>
void Fields(Archive& archive, Hello& hello) {
  archive(hello.job, hello.session, hello.incarnation);
  archive.Enum(hello.role, Role::kAdmin);
  archive(hello.process, hello.launcher_attempt, hello.supervised, hello.features,
          hello.expected_server, hello.hosts_store, hello.leased_key, hello.leased_value);
}

// Of an answer that is kept: neither a Welcome nor a status page ever is, and values that it shares
// with others have a row of their own (SharedResults).
template <typename Archive>
void Fields(Archive& archive, Reply& reply) {
  archive(reply.seq, reply.status, reply.value, reply.values, reply.number, reply.flag,
          reply.revision);
}

template <typename Archive>
void Fields(Archive& archive, DeviceClaim& claim) {
  archive(claim.uuid, claim.host, claim.ordinal, claim.visible, claim.visible_devices,
          claim.local_rank);
}

template <typename Archive>
void Fields(Archive& archive, JoinRequest& request) {
  archive(request.rank, request.world_size, request.endpoint, request.join_timeout,
          request.seat_wait, request.generation, request.device, request.min_world, request.number,
          request.spare_if_taken);
}

template <typename Archive>
void Fields(Archive& archive, Member& member) {
  archive(member.rank, member.incarnation, member.host, member.pid, member.endpoint);
}

template <typename Archive>
void Fields(Archive& archive, View& view) {
  archive(view.life, view.round, view.generation, view.attempt, view.secret, view.world_secret,
          view.members);
}

}  // namespace resilient::store
