#include <algorithm>
#include <utility>

#include "runtime/base/log.h"
#include "store/client/reply_parts.h"
#include "store/client/request_client.h"

// The operations one by one: what each sends, what it may weigh, and what its answer is.
namespace resilient::store {
namespace {

// What protobuf and the frame add to the keys and values of a request, at most.
constexpr std::size_t kBytesPerField = 16;
constexpr std::size_t kRequestOverhead = 1u << 10;

std::size_t BytesOf(std::span<const std::string> keys) {
  std::size_t bytes = 0;
  for (const std::string& key : keys) bytes += key.size() + kBytesPerField;
  return bytes;
}

Result<std::string> ValueOf(Result<Reply> reply) {
  if (!reply.ok()) return reply.status();
  return std::move(reply->value);
}

Result<bool> FlagOf(const Result<Reply>& reply) {
  if (!reply.ok()) return reply.status();
  return reply.value().flag;
}

}  // namespace

RequestClient::Ask& RequestClient::Ask::With(const std::string& value) {
  ++values;
  value_bytes += value.size();
  largest = std::max(largest, value.size());
  return *this;
}

Status RequestClient::Set(const std::string& key, std::string value, const Call& call) {
  Ask ask{"set", {&key, 1}, true};
  ask.With(value);
  return Perform(ask, SetOp{key, std::move(value)}, call).status();
}

Result<std::string> RequestClient::Get(const std::string& key, bool wait, const Call& call) {
  return ValueOf(Perform(Ask{"get", {&key, 1}}, GetOp{key, wait}, call));
}

Result<std::int64_t> RequestClient::Add(const std::string& key, std::int64_t amount,
                                        const Call& call) {
  return NumberOf(Perform(Ask{"add", {&key, 1}, true}, AddOp{key, amount}, call));
}

Result<std::string> RequestClient::CompareSet(const std::string& key, std::string expected,
                                              std::string desired, const Call& call) {
  Ask ask{"compare_set", {&key, 1}, true};
  ask.With(expected).With(desired);
  return ValueOf(Perform(ask, CompareSetOp{key, std::move(expected), std::move(desired)}, call));
}

Result<bool> RequestClient::Check(const std::vector<std::string>& keys, const Call& call) {
  return FlagOf(Perform(Ask{"check", keys}, CheckOp{keys}, call));
}

Status RequestClient::Wait(const std::vector<std::string>& keys, const Call& call) {
  return Perform(Ask{"wait", keys}, WaitOp{keys}, call).status();
}

Result<bool> RequestClient::Delete(const std::string& key, const Call& call) {
  return FlagOf(Perform(Ask{"delete", {&key, 1}, true}, DeleteOp{key}, call));
}

Result<std::int64_t> RequestClient::NumKeys(const Call& call) {
  return NumberOf(Perform(Ask{"num_keys", {}}, NumKeysOp{}, call));
}

Result<std::int64_t> RequestClient::Append(const std::string& key, std::string value,
                                           const Call& call) {
  Ask ask{"append", {&key, 1}, true};
  ask.With(value);
  return NumberOf(Perform(ask, AppendOp{key, std::move(value)}, call));
}

Result<std::vector<std::string>> RequestClient::MultiGet(const std::vector<std::string>& keys,
                                                         bool wait, const Call& call) {
  Ask ask{"multi_get", keys};
  Result<Reply> reply = Perform(ask, MultiGetOp{keys, wait}, call);
  if (!reply.ok()) return reply.status();
  RESILIENT_RETURN_IF_ERROR(CheckCount(ask, reply->values.size(), keys.size()));
  return std::move(reply->values);
}

Status RequestClient::MultiSet(const std::vector<std::string>& keys,
                               std::vector<std::string> values, const Call& call) {
  Ask ask{"multi_set", keys, true};
  if (keys.size() != values.size()) {
    return Status(StatusCode::kInvalidArgument,
                  StrCat("multi_set of ", keys.size(), " keys got ", values.size(),
                         " values: there must be one for each key"));
  }
  for (const std::string& value : values) ask.With(value);
  return Perform(ask, MultiSetOp{keys, std::move(values)}, call).status();
}

Result<std::vector<std::string>> RequestClient::ListKeys(const std::string& prefix,
                                                         const Call& call) {
  const Ask ask{"list_keys", {&prefix, 1}};
  std::vector<std::string> keys;
  while (true) {
    std::string after = keys.empty() ? std::string() : keys.back();
    Result<Reply> page = Perform(ask, ListKeysOp{prefix, std::move(after)}, call);
    if (!page.ok()) return page.status();
    const bool more = page->flag;
    // Each page must lead on, or the listing would have no end.
    if (more && (page->values.empty() || (!keys.empty() && page->values.back() <= keys.back()))) {
      return Status(StatusCode::kProtocol, "list_keys: the store's pages do not lead on");
    }
    std::move(page->values.begin(), page->values.end(), std::back_inserter(keys));
    if (!more) return keys;
  }
}

Result<std::int64_t> RequestClient::QueuePush(const std::string& key, std::string value,
                                              const Call& call) {
  Ask ask{"queue_push", {&key, 1}, true};
  ask.With(value);
  return NumberOf(Perform(ask, QueuePushOp{key, std::move(value)}, call));
}

Result<std::string> RequestClient::QueuePop(const std::string& key, bool wait, const Call& call) {
  return ValueOf(Perform(Ask{"queue_pop", {&key, 1}, true}, QueuePopOp{key, wait}, call));
}

Result<std::int64_t> RequestClient::QueueLength(const std::string& key, const Call& call) {
  return NumberOf(Perform(Ask{"queue_len", {&key, 1}}, QueueLengthOp{key}, call));
}

Status RequestClient::Barrier(const std::string& key, std::int64_t size, const Call& call) {
  if (size <= 0) {
    return Status(StatusCode::kInvalidArgument,
                  StrCat("barrier ", key, ": a size of ", size, "; it must be at least 1"));
  }
  Ask ask{"barrier", {&key, 1}, true};
  ask.meeting = true;
  return Perform(ask, BarrierOp{key, size}, call).status();
}

Result<std::vector<std::string>> RequestClient::Exchange(const std::string& key, std::int64_t rank,
                                                         std::int64_t size, std::string value,
                                                         const Call& call) {
  if (rank < 0 || rank >= size) {
    return Status(StatusCode::kInvalidArgument, StrCat("exchange ", key, ": rank ", rank, " of ",
                                                       size, "; it must be from 0 to size - 1"));
  }
  Ask ask{"exchange", {&key, 1}, true};
  ask.meeting = true;
  ask.With(value);
  Result<Reply> reply =
      Perform(ask, ExchangeOp{key, rank, size, std::move(value), call.survivors_of}, call);
  if (!reply.ok()) return reply.status();
  RESILIENT_RETURN_IF_ERROR(CheckCount(ask, reply->values.size(), static_cast<std::size_t>(size)));
  return std::move(reply->values);
}

Result<std::string> RequestClient::StatusJson(const StatusQuery& query, const Call& call) {
  Result<Reply> reply = Perform(Ask{"status", {}}, OpOf(query), call);
  if (!reply.ok()) return reply.status();
  return std::move(reply->status_json);
}

// Refused here, so that what cannot be served is not carried to the store first.
Status RequestClient::CheckSizes(const Ask& ask) {
  for (const std::string& key : ask.keys) {
    if (key.size() > kKeyBytesMax) {
      const Ask one{ask.name, {&key, 1}};
      return Status(StatusCode::kTooLarge,
                    StrCat(ask.name, ": a key of ", key.size(), " bytes (", one.ShowKeys(),
                           ") exceeds the limit of ", kKeyBytesMax, " bytes"));
    }
  }
  if (ask.largest > kValueBytesMax) {
    return Status(StatusCode::kTooLarge,
                  StrCat(ask.name, " of ", ask.ShowKeys(), ": a value of ", ask.largest,
                         " bytes exceeds the limit of ", kValueBytesMax, " bytes"));
  }
  if (ask.keys.size() > kKeysPerRequestMax) {
    return Status(StatusCode::kTooLarge,
                  StrCat(ask.name, ": ", ask.keys.size(), " keys exceed the limit of ",
                         kKeysPerRequestMax, " for one request; split them"));
  }
  const std::size_t bytes = BytesOf(ask.keys) + ask.values * kBytesPerField + ask.value_bytes;
  if (bytes + kRequestOverhead <= kMaxFrameBody) return Status();
  return Status(StatusCode::kTooLarge,
                StrCat(ask.name, " of ", ask.ShowKeys(), ": ", ask.keys.size(), " keys and ",
                       ask.values, " values of ", bytes, " bytes together exceed the limit of ",
                       kMaxFrameBody, " bytes for one request; split them"));
}

Status RequestClient::CheckCount(const Ask& ask, std::size_t got, std::size_t wanted) {
  if (got == wanted) return Status();
  return Status(StatusCode::kProtocol, StrCat(ask.name, " of ", ask.ShowKeys(), ": the store sent ",
                                              got, " values instead of ", wanted));
}

}  // namespace resilient::store
