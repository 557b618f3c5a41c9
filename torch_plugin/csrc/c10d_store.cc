#include "torch_plugin/csrc/c10d_store.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "torch_plugin/csrc/convert.h"

namespace resilient::plugin {
namespace {

// By pointers: between iterators of different types the library copies byte by byte.
std::string ToString(const std::vector<std::uint8_t>& bytes) {
  return std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

std::vector<std::uint8_t> ToBytes(const std::string& text) {
  const auto* bytes = reinterpret_cast<const std::uint8_t*>(text.data());
  return std::vector<std::uint8_t>(bytes, bytes + text.size());
}

void Taken(Host& host, const Status& status) { Check(host, status); }
template <typename T>
T Taken(Host& host, Result<T> result) {
  return ValueOrThrow(host, std::move(result));
}

Status StatusOf(const Status& status) { return status; }
template <typename T>
Status StatusOf(const Result<T>& result) {
  return result.status();
}

// True for what a server answers when the generation of a wait is over.
// c10d: zero is no timeout.
Deadline DeadlineOf(std::chrono::milliseconds timeout) {
  if (timeout <= std::chrono::milliseconds::zero()) return Deadline::Never();
  return Deadline::After(SystemClock().Now(), Saturated(timeout));
}

}  // namespace

Result<c10::intrusive_ptr<ResilientStore>> ResilientStore::Standalone(
    const store::ConnectOptions& options, std::chrono::milliseconds timeout,
    std::shared_ptr<Host> host) {
  static constinit const SystemClock clock;  // The client outlives this call; a clock has no state.
  std::optional<Result<std::shared_ptr<store::Client>>> client;
  const InterruptCheck interrupt = [host] { return host->Interrupted(); };
  host->WithoutLock(
      [&] { client.emplace(store::Connect(options, interrupt, clock, DeadlineOf(timeout))); });
  if (!client->ok()) return client->status();
  return c10::make_intrusive<ResilientStore>(std::move(*client).value(), nullptr, std::move(host),
                                             timeout, options);
}

Result<c10::intrusive_ptr<ResilientStore>> ResilientStore::OfSession(
    std::shared_ptr<SessionContext> context, std::chrono::milliseconds timeout) {
  auto client = context->client();
  if (!client.ok()) return client.status();
  auto host = context->host();
  return c10::make_intrusive<ResilientStore>(std::move(client).value(), std::move(context),
                                             std::move(host), timeout);
}

ResilientStore::ResilientStore(std::shared_ptr<store::Client> client,
                               std::shared_ptr<SessionContext> context, std::shared_ptr<Host> host,
                               std::chrono::milliseconds timeout, store::ConnectOptions options)
    : Store(timeout),
      context_(std::move(context)),
      client_(std::move(client)),
      host_(std::move(host)),
      options_(std::move(options)),
      scope_(context_ ? context_->round() : 0) {}

ResilientStore::~ResilientStore() = default;

c10::intrusive_ptr<c10d::Store> ResilientStore::clone() {
  if (context_ != nullptr) {
    return c10::make_intrusive<ResilientStore>(client_, context_, host_, timeout_);
  }
  return ValueOrThrow(*host_, Standalone(options_, timeout_, host_));
}

void ResilientStore::Close() {
  if (context_ != nullptr) return;
  host_->WithoutLock([this] { client_->Close(); });
}

store::Client::Call ResilientStore::MakeCall(std::chrono::milliseconds timeout, Waits waits) const {
  store::Client::Call call;
  call.deadline = DeadlineOf(timeout);
  call.scope = scope_;
  if (context_ == nullptr) return call;
  switch (waits) {
    case Waits::kForOthers:
      call.stop = [context = context_, was_open = context_->client().ok()] {
        // The close ends what waits; a library that has kept the store may go on to use it.
        if (Status open = context->client().status(); was_open && !open.ok()) return open;
        return context->session().failure();
      };
      break;
    case Waits::kNo:
      call.deadline = std::min(call.deadline,
                               Deadline::After(context_->clock().Now(), context_->ladder().answer));
      break;
  }
  return call;
}

// Runs a client call, which may block, without the interpreter's lock.
template <typename Body>
auto ResilientStore::Run(Body body) const {
  std::optional<decltype(body())> result;
  host_->WithoutLock([&] { result.emplace(body()); });
  return std::move(*result);
}

// The server ends a wait with the cause of a fence on this connection, and tells the session on
// another: the error is raised once the session knows, so that what is sticky is so from the first.
Status ResilientStore::Settled(Status status) const {
  if (context_ == nullptr || !EndsGeneration(status.code())) return status;
  const Instant now = context_->clock().Now();
  // What is raised here alone the others must meet, too.
  const Duration grace =
      context_->session().Object(status) ? context_->ladder().rebuild : kFenceGrace;
  const Status known = context_->session().AwaitFailure(Deadline::After(now, grace));
  return known.ok() ? status : known;
}

bool ResilientStore::IsGotOver(const Status& status) const {
  return status.code() == StatusCode::kCommFailed && context_ != nullptr &&
         context_->options().session.replay && context_->session().failure().ok();
}

template <typename T>
Result<T> ResilientStore::Settled(Result<T> result) const {
  if (result.ok()) return result;
  return Settled(result.status());
}

template <typename Body>
auto ResilientStore::Ask(Body body) const {
  return Taken(*host_, Run([&] { return body(MakeCall(timeout_, Waits::kNo)); }));
}

template <typename Body>
auto ResilientStore::Await(std::chrono::milliseconds timeout, Body body) const {
  if (context_ != nullptr) Check(*host_, context_->session().failure());
  return Taken(*host_, Run([&] { return Settled(body(MakeCall(timeout, Waits::kForOthers))); }));
}

// Where the session does not get over it, the call ends with the failure as soon as that is known.
template <typename Body>
auto ResilientStore::AwaitOverLinks(std::chrono::milliseconds timeout, Body body) const {
  if (context_ != nullptr) Check(*host_, context_->session().failure());
  return Taken(*host_, Run([&] {
    const store::Client::Call call = MakeCall(timeout, Waits::kForOthers);
    auto result = body(call);
    while (IsGotOver(StatusOf(result))) result = body(call);
    return Settled(std::move(result));
  }));
}

void ResilientStore::set(const std::string& key, const std::vector<std::uint8_t>& value) {
  SetText(key, ToString(value));
}

void ResilientStore::SetText(const std::string& key, std::string value) {
  Ask([&](const auto& call) { return client_->Set(key, std::move(value), call); });
}

std::vector<std::uint8_t> ResilientStore::compareSet(const std::string& key,
                                                     const std::vector<std::uint8_t>& expected,
                                                     const std::vector<std::uint8_t>& desired) {
  return ToBytes(Ask([&](const auto& call) {
    return client_->CompareSet(key, ToString(expected), ToString(desired), call);
  }));
}

std::vector<std::uint8_t> ResilientStore::get(const std::string& key) {
  return ToBytes(GetText(key));
}

std::string ResilientStore::GetText(const std::string& key) {
  return AwaitOverLinks(timeout_,
                        [&](const auto& call) { return client_->Get(key, /*wait=*/true, call); });
}

std::int64_t ResilientStore::add(const std::string& key, std::int64_t amount) {
  return Ask([&](const auto& call) { return client_->Add(key, amount, call); });
}

bool ResilientStore::deleteKey(const std::string& key) {
  return Ask([&](const auto& call) { return client_->Delete(key, call); });
}

bool ResilientStore::check(const std::vector<std::string>& keys) {
  return Ask([&](const auto& call) { return client_->Check(keys, call); });
}

std::int64_t ResilientStore::getNumKeys() {
  return Ask([&](const auto& call) { return client_->NumKeys(call); });
}

void ResilientStore::wait(const std::vector<std::string>& keys) { wait(keys, timeout_); }

void ResilientStore::wait(const std::vector<std::string>& keys,
                          const std::chrono::milliseconds& timeout) {
  AwaitOverLinks(timeout, [&](const auto& call) { return client_->Wait(keys, call); });
}

void ResilientStore::append(const std::string& key, const std::vector<std::uint8_t>& value) {
  Ask([&](const auto& call) { return client_->Append(key, ToString(value), call); });
}

std::vector<std::vector<std::uint8_t>> ResilientStore::multiGet(
    const std::vector<std::string>& keys) {
  const std::vector<std::string> texts = AwaitOverLinks(
      timeout_, [&](const auto& call) { return client_->MultiGet(keys, /*wait=*/true, call); });
  std::vector<std::vector<std::uint8_t>> values;
  values.reserve(texts.size());
  for (const std::string& text : texts) values.push_back(ToBytes(text));
  return values;
}

void ResilientStore::multiSet(const std::vector<std::string>& keys,
                              const std::vector<std::vector<std::uint8_t>>& values) {
  std::vector<std::string> texts;
  texts.reserve(values.size());
  for (const auto& value : values) texts.push_back(ToString(value));
  Ask([&](const auto& call) { return client_->MultiSet(keys, std::move(texts), call); });
}

void ResilientStore::queuePush(const std::string& key, const std::vector<std::uint8_t>& value) {
  Ask([&](const auto& call) { return client_->QueuePush(key, ToString(value), call); });
}

std::vector<std::uint8_t> ResilientStore::queuePop(const std::string& key, bool block) {
  const auto pop = [&](const auto& call) { return client_->QueuePop(key, block, call); };
  return ToBytes(block ? Await(timeout_, pop) : Ask(pop));
}

std::int64_t ResilientStore::queueLen(const std::string& key) {
  return Ask([&](const auto& call) { return client_->QueueLength(key, call); });
}

std::vector<std::string> ResilientStore::listKeys() {
  return Ask([&](const auto& call) { return client_->ListKeys("", call); });
}

void ResilientStore::barrier(const std::string& key, std::int64_t world_size,
                             const std::chrono::milliseconds& timeout) {
  Await(timeout, [&](const auto& call) { return client_->Barrier(key, world_size, call); });
}

std::vector<std::string> ResilientStore::Exchange(const std::string& key, std::int64_t rank,
                                                  std::int64_t size, std::string value,
                                                  const std::chrono::milliseconds& timeout) {
  return Await(timeout, [&](const auto& call) {
    return client_->Exchange(key, rank, size, std::move(value), call);
  });
}

std::vector<std::string> ResilientStore::Agree(const std::string& key, std::int64_t rank,
                                               std::int64_t size, std::string value,
                                               std::uint64_t generation,
                                               const std::chrono::milliseconds& timeout) {
  if (context_ == nullptr) {
    Check(*host_, Status(StatusCode::kFailedPrecondition, "agree needs the store of a session"));
  }
  return Await(timeout, [&](store::Client::Call call) {
    call.generation = generation;
    call.settle = context_->ladder().answer;
    return client_->Exchange(key, rank, size, std::move(value), call);
  });
}

std::vector<std::string> ResilientStore::AgreeAmongSurvivors(
    const std::string& key, std::int64_t rank, std::int64_t size, std::string value,
    std::uint64_t generation, const std::chrono::milliseconds& timeout) {
  if (context_ == nullptr) {
    Check(*host_, Status(StatusCode::kFailedPrecondition, "agree needs the store of a session"));
  }
  return Taken(*host_, Run([&] {
    store::Client::Call call = MakeCall(timeout, Waits::kForOthers);
    // Only this process's own end ends it.
    call.stop = [context = context_] {
      Status failure = context->session().failure();
      return failure.code() == StatusCode::kStaleGeneration ? failure : Status::Ok();
    };
    call.survivors_of = generation;
    call.settle = context_->ladder().answer;
    return Settled(client_->Exchange(key, rank, size, std::move(value), call));
  }));
}

}  // namespace resilient::plugin
