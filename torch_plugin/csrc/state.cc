#include <algorithm>
#include <deque>
#include <optional>
#include <set>
#include <utility>

#include <ATen/Functions.h>
#include <c10/util/StringUtil.h>
#include <resilient/torch.h>

#include "torch_plugin/csrc/convert.h"
#include "torch_plugin/csrc/places.h"
#include "torch_plugin/csrc/replica_check.h"
#include "torch_plugin/csrc/snapshot.h"
#include "torch_plugin/csrc/state_values.h"
#include "torch_plugin/csrc/work.h"
#include "torch_plugin/csrc/world.h"

namespace resilient {
namespace {

using plugin::Snapshot;
using plugin::StateValue;

// The same bounds and keys as in torch_resilient/_state.py. A per-rank part is one value of the
// store; its limit for values is 8 MiB with key and framing.
constexpr std::size_t kPerRankBytesMax = std::size_t{8} * 1024 * 1024 - 4096;
constexpr std::size_t kKeptCommits = 2;
constexpr char kRandomNumbers[] = "random numbers";

// A commit: who made it and which one it was.
struct Key {
  std::int64_t generation = -1;
  std::int64_t number = -1;
  friend bool operator==(const Key&, const Key&) = default;
  // The newest is the last.
  friend bool operator<(const Key& a, const Key& b) {
    return std::pair(a.number, a.generation) < std::pair(b.number, b.generation);
  }
};

// What a rank keeps of a commit, and under which number in how large a world.
struct HeldCommit {
  Key key;
  int rank = -1;
  int world_size = 0;
};
using Holdings = std::vector<std::vector<HeldCommit>>;  // By present rank.

const HeldCommit* FindHeld(const std::vector<HeldCommit>& commits, const Key& key) {
  const auto found = std::find_if(commits.begin(), commits.end(),
                                  [&key](const HeldCommit& held) { return held.key == key; });
  return found == commits.end() ? nullptr : &*found;
}

// A rank beyond those that a commit was made by: it has what it was made with.
constexpr int kNoSeat = -1;

// Whose per-rank part each rank has: its own of then, and one that does not hold the commit, that
// of the same number; kNoSeat: none. Nothing when that is not known: the numbers were others then.
std::optional<std::vector<int>> SeatsOf(const Holdings& holdings, const Key& key) {
  const int size = static_cast<int>(holdings.size());
  int then = 0;  // The same on all that hold it.
  for (const std::vector<HeldCommit>& commits : holdings) {
    if (const HeldCommit* held = FindHeld(commits, key)) then = held->world_size;
  }
  std::vector<int> same;
  std::vector<int> own;
  for (int rank = 0; rank < size; ++rank) {
    const HeldCommit* held = FindHeld(holdings[static_cast<std::size_t>(rank)], key);
    if (held == nullptr || held->rank == rank) same.push_back(rank < then ? rank : kNoSeat);
    if (held != nullptr) own.push_back(held->rank);
  }
  if (then > size) same.clear();
  if (static_cast<int>(same.size()) == size) return same;
  if (static_cast<int>(own.size()) == size) return own;
  return std::nullopt;
}

// What rank 0 decides for all.
enum class Verdict : std::int64_t { kNothingYet = 0, kChosen, kIncomplete };
struct Decision {
  Verdict verdict = Verdict::kNothingYet;
  Key key;
};

// Of what a rank says of its place, or of values that do not fit.
constexpr std::size_t kTextBytesMax = 1024;

}  // namespace

struct State::Impl {
  ProcessGroup world;
  std::optional<plugin::StateName> name;  // Once it has been used.
  bool over = false;                      // Its elastic run has ended.
  std::shared_ptr<plugin::SessionContext> context;
  plugin::StateValues replicated;
  plugin::StateValues per_rank;
  std::deque<std::pair<HeldCommit, Snapshot>> commits;  // Oldest first, at most kKeptCommits.
  // Per-rank parts of this seat in the store, with the number that it had; oldest first.
  std::deque<std::pair<Key, int>> parts;
  std::optional<std::int64_t> generation;  // At which commits are made: that of the last sync.
  std::int64_t number = 0;                 // Of the newest commit.
  bool begun = false;              // Commit 1 was complete, and values may have changed since.
  std::function<void()> observer;  // Called after each commit.
  bool thrown_on_all = false;      // By the present use.
  plugin::ReplicaCheck replica_check;

  void Check(const Status& status) const { plugin::Check(*context->host(), status); }
  void RaiseFailure() const { Check(context->session().failure()); }
  // What was copied may come from operations on a device that nobody has seen the end of.
  void AwaitJoined() const { Check(plugin::AwaitJoined(*context)); }
  // The same on all ranks, also where the session gets over a link between their reads of it.
  std::int64_t PresentGeneration() const {
    return static_cast<std::int64_t>(context->session().epoch());
  }
  int rank() const { return world->getRank(); }

  std::string CommitKey(const Key& key) const;
  std::string PartKey(const Key& key, int rank) const;
  void CheckReplicas();
  plugin::Whereabouts& whereabouts() const { return context->whereabouts(); }
  void Add(StateValue value, Part part);
  // Begins a use: what an elastic run that has ended has left goes, and the State has a name.
  void Enter();
  plugin::Place PresentPlace() const;
  // Throws what all ranks throw here.
  [[noreturn]] void ThrowOnAll(const Status& status);
  // kSetting on all ranks where `said` is an error on any.
  void RefuseOnAll(const Status& said);
  const Snapshot* Find(const Key& key) const;
  HeldCommit Hold(const Key& key) const { return {key, rank(), world->getSize()}; }
  // `any_begun`: on any rank. kSetting on all ranks where they are at different places.
  Holdings GatherHeld(bool* any_begun);
  [[noreturn]] void RefusePlaces();
  Decision Choose(const Holdings& holdings, bool any_begun) const;
  Decision Agree(const Holdings& holdings, bool any_begun) const;
  std::vector<std::uint8_t> PackPerRank() const;
  void PutPart(const Key& key, const std::vector<std::uint8_t>& part);
  std::vector<std::uint8_t> FetchPart(const Holdings& holdings, Key* key, std::int64_t generation);
  void DropOldParts();
};

// Unique in the world: of this State, and of this commit of it.
std::string State::Impl::CommitKey(const Key& key) const {
  return c10::str("state/", name->run, ".", name->number, "/", key.generation, ".", key.number);
}

std::string State::Impl::PartKey(const Key& key, int rank) const {
  return c10::str(CommitKey(key), "/", rank);
}

void State::Impl::CheckReplicas() {
  std::set<const void*> own;
  for (const StateValue& value : per_rank) {
    for (const at::Tensor& tensor : value.read()) own.insert(tensor.const_data_ptr());
  }
  const auto key_of = [this](std::int64_t commit) { return CommitKey({*generation, commit}); };
  replica_check.AfterCommit(world, key_of, number, commits.back().second, replicated, own);
}

void State::Impl::Enter() {
  if (over) {
    over = false;
    begun = false;
    commits.clear();
    parts.clear();
    generation.reset();
    number = 0;
    name.reset();
  }
  thrown_on_all = false;
  if (!name) name = whereabouts().NameState();
}

plugin::Place State::Impl::PresentPlace() const {
  plugin::Place place{
      .runs = whereabouts().runs(), .active = whereabouts().active(), .state = *name, .names = {}};
  for (const StateValue& value : replicated) place.names.push_back(value.name);
  return place;
}

void State::Impl::ThrowOnAll(const Status& status) {
  thrown_on_all = true;
  try {
    // One that ended before the others know what this one does would be a loss to them.
    world->barrier()->wait();
  } catch (const c10::DistError&) {
    context->host()->Throw(status);  // By then all have begun to throw it.
  }
  context->host()->Throw(status);
}

void State::Impl::RefusePlaces() {
  const auto places = plugin::GatherTexts(world, PresentPlace().Text(), kTextBytesMax);
  ThrowOnAll(Status(StatusCode::kSetting, plugin::DifferenceOf(places)));
}

void State::Impl::RefuseOnAll(const Status& said) {
  at::Tensor any = at::full({1}, said.ok() ? 0 : 1, at::kLong);
  std::vector<at::Tensor> tensors = {any};
  world->allreduce(tensors)->wait();
  if (any.item<std::int64_t>() == 0) return;
  const auto texts = plugin::GatherTexts(world, said.ok() ? "" : said.message(), kTextBytesMax);
  std::string all = "values of the commit cannot be brought back";
  for (std::size_t i = 0; i < texts.size(); ++i) {
    if (!texts[i].empty()) all += c10::str(" / on rank ", i, ": ", texts[i]);
  }
  ThrowOnAll(Status(StatusCode::kSetting, all));
}

void State::Impl::Add(StateValue value, Part part) {
  for (const plugin::StateValues* values : {&replicated, &per_rank}) {
    for (const StateValue& other : *values) {
      if (other.name != value.name) continue;
      Check(Status(StatusCode::kInvalidArgument,
                   c10::str("the state has a value '", value.name, "' already")));
    }
  }
  (part == Part::kReplicated ? replicated : per_rank).push_back(std::move(value));
}

const Snapshot* State::Impl::Find(const Key& key) const {
  for (const auto& [held, snapshot] : commits) {
    if (held.key == key) return &snapshot;
  }
  return nullptr;
}

Holdings State::Impl::GatherHeld(bool* any_begun) {
  constexpr std::size_t kNumbersPerCommit = 4;
  constexpr auto kNumbers = static_cast<std::int64_t>(2 + kNumbersPerCommit * kKeptCommits);
  at::Tensor mine = at::full({kNumbers}, -1, at::kLong);
  auto* out = mine.mutable_data_ptr<std::int64_t>();
  const auto place = static_cast<std::int64_t>(PresentPlace().Digest());
  *out++ = place;
  *out++ = begun ? 1 : 0;
  for (const auto& [held, snapshot] : commits) {
    for (const std::int64_t number : {held.key.generation, held.key.number, std::int64_t{held.rank},
                                      std::int64_t{held.world_size}}) {
      *out++ = number;
    }
  }
  std::vector<std::vector<at::Tensor>> all(1);
  all[0].reserve(static_cast<std::size_t>(world->getSize()));
  for (int i = 0; i < world->getSize(); ++i) all[0].push_back(at::empty({kNumbers}, at::kLong));
  std::vector<at::Tensor> input = {mine};
  world->allgather(all, input)->wait();
  const bool together =
      std::all_of(all[0].begin(), all[0].end(), [place](const at::Tensor& tensor) {
        return *tensor.const_data_ptr<std::int64_t>() == place;
      });
  if (!together) RefusePlaces();
  Holdings holdings;
  holdings.reserve(all[0].size());
  for (const at::Tensor& tensor : all[0]) {
    const auto* in = tensor.const_data_ptr<std::int64_t>() + 1;
    *any_begun = *in++ != 0 || *any_begun;
    std::vector<HeldCommit>& commits_there = holdings.emplace_back();
    for (std::size_t i = 0; i < kKeptCommits; ++i, in += kNumbersPerCommit) {
      if (in[1] < 0) continue;
      commits_there.push_back({{in[0], in[1]}, static_cast<int>(in[2]), static_cast<int>(in[3])});
    }
  }
  return holdings;
}

// The newest commit whose per-rank parts exist for every seat. Nothing when there is none yet:
// before the first commit is complete nobody has changed anything, or `any_begun`.
Decision State::Impl::Choose(const Holdings& holdings, bool any_begun) const {
  std::set<Key> known;
  for (const std::vector<HeldCommit>& commits_there : holdings) {
    for (const HeldCommit& held : commits_there) known.insert(held.key);
  }
  const auto complete = [&](const Key& key) {
    const std::optional<std::vector<int>> seats = SeatsOf(holdings, key);
    if (!seats) return false;
    std::vector<std::string> parts_of_all;
    parts_of_all.reserve(seats->size());
    for (const int seat : *seats) {
      if (seat != kNoSeat) parts_of_all.push_back(PartKey(key, seat));
    }
    return world->getStore()->check(parts_of_all);
  };
  const auto newest = std::find_if(known.rbegin(), known.rend(), complete);
  if (newest != known.rend()) return {Verdict::kChosen, *newest};
  const bool only_first = !any_begun && std::all_of(known.begin(), known.end(),
                                                    [](const Key& key) { return key.number == 1; });
  return {only_first ? Verdict::kNothingYet : Verdict::kIncomplete, {}};
}

Decision State::Impl::Agree(const Holdings& holdings, bool any_begun) const {
  at::Tensor words = at::zeros({3}, at::kLong);
  auto* word = words.mutable_data_ptr<std::int64_t>();
  if (rank() == 0) {
    const Decision decision = Choose(holdings, any_begun);
    word[0] = static_cast<std::int64_t>(decision.verdict);
    word[1] = decision.key.generation;
    word[2] = decision.key.number;
  }
  std::vector<at::Tensor> tensors = {words};
  world->broadcast(tensors)->wait();
  return {static_cast<Verdict>(word[0]), {word[1], word[2]}};
}

std::vector<std::uint8_t> State::Impl::PackPerRank() const {
  const std::string packed = plugin::PackSnapshot(plugin::TakeSnapshot(per_rank, nullptr));
  if (packed.size() > kPerRankBytesMax) {
    Check(Status(StatusCode::kInvalidArgument,
                 c10::str("the per-rank part of the state has ", packed.size(),
                          " bytes; the store keeps at most ", kPerRankBytesMax,
                          ". Keep what is large in the replicated part or in a checkpoint")));
  }
  return {packed.begin(), packed.end()};
}

void State::Impl::PutPart(const Key& key, const std::vector<std::uint8_t>& part) {
  world->getStore()->set(PartKey(key, rank()), part);
  parts.emplace_back(key, rank());
}

// This rank's part of the commit `*key`. Where the ranks have been numbered anew since, or there
// are more, the commit goes on as one of `generation` under the present numbers, for one who takes
// a seat later.
std::vector<std::uint8_t> State::Impl::FetchPart(const Holdings& holdings, Key* key,
                                                 std::int64_t generation) {
  const std::vector<int> seats = SeatsOf(holdings, *key).value();
  const int own = seats[static_cast<std::size_t>(rank())];
  std::vector<std::uint8_t> part =
      own == kNoSeat ? PackPerRank() : world->getStore()->get(PartKey(*key, own));
  for (int seat = 0; seat < world->getSize(); ++seat) {
    if (seats[static_cast<std::size_t>(seat)] == seat) continue;
    key->generation = generation;
    PutPart(*key, part);
    break;
  }
  return part;
}

void State::Impl::DropOldParts() {
  // One more than the commits in memory: a peer may be one commit behind.
  while (parts.size() > kKeptCommits + 1) {
    const auto& [key, seat] = parts.front();
    world->getStore()->deleteKey(PartKey(key, seat));
    parts.pop_front();
  }
}

State::State(ProcessGroup world) : impl_(std::make_unique<Impl>()) {
  impl_->context = plugin::ValueOrThrow(*plugin::NativeHost(), plugin::ContextOf(world));
  impl_->world = std::move(world);
  impl_->per_rank.push_back(plugin::RandomNumbersValue(kRandomNumbers));
}

State::~State() = default;

State& State::add(const std::string& name, torch::nn::Module& module, Part part) {
  impl_->Add(plugin::ModuleValue(name, module), part);
  return *this;
}

State& State::add(const std::string& name, torch::optim::Optimizer& optimizer, Part part) {
  impl_->Add(plugin::OptimizerValue(name, optimizer), part);
  return *this;
}

State& State::add(const std::string& name,
                  at::Tensor tensor,  // NOLINT(performance-unnecessary-value-param): public.
                  Part part) {
  impl_->Add(plugin::TensorValue(name, tensor), part);
  return *this;
}

State& State::add(const std::string& name, std::int64_t& number, Part part) {
  impl_->Add(plugin::NumberValue(name, number), part);
  return *this;
}

State& State::add(const std::string& name, double& number, Part part) {
  impl_->Add(plugin::NumberValue(name, number), part);
  return *this;
}

void State::commit() {
  Impl& own = *impl_;
  own.world = plugin::PresentWorld(own.world);
  own.RaiseFailure();
  own.Enter();
  if (!own.generation) own.generation = own.PresentGeneration();
  const Key key{*own.generation, own.number + 1};
  std::optional<Snapshot> reused;
  if (own.commits.size() >= kKeptCommits) {
    reused = std::move(own.commits.front().second);
    own.commits.pop_front();
  }
  Snapshot snapshot = plugin::TakeSnapshot(own.replicated, reused ? &*reused : nullptr);
  own.PutPart(key, own.PackPerRank());
  own.AwaitJoined();
  own.RaiseFailure();
  own.commits.emplace_back(own.Hold(key), std::move(snapshot));
  own.number = key.number;
  own.DropOldParts();
  own.CheckReplicas();
  if (own.observer) own.observer();
}

void State::restore() {
  if (impl_->commits.empty()) {
    impl_->Check(Status(StatusCode::kInvalidArgument, "nothing was committed yet"));
  }
  impl_->Check(plugin::LoadSnapshot(impl_->replicated, impl_->commits.back().second));
}

void State::sync() {
  Impl& own = *impl_;
  own.world = plugin::PresentWorld(own.world);
  own.RaiseFailure();
  own.Enter();
  const std::int64_t generation = own.PresentGeneration();
  bool any_begun = false;
  const Holdings holdings = own.GatherHeld(&any_begun);
  Decision decision = own.Agree(holdings, any_begun);
  if (decision.verdict == Verdict::kIncomplete) {
    own.ThrowOnAll(
        Status(StatusCode::kCommFailed,
               "no commit is complete: for each of those that the ranks hold the per-rank "
               "part of some rank is missing in the store. The run cannot go on from memory: "
               "start it from a checkpoint, and commit on every rank at the same steps"));
  }
  const bool chosen = decision.verdict == Verdict::kChosen;
  const auto holds = [key = decision.key](const std::vector<HeldCommit>& commits_there) {
    return FindHeld(commits_there, key) != nullptr;
  };
  Snapshot snapshot;
  int source = 0;
  if (!chosen) {
    if (own.rank() == 0) snapshot = plugin::TakeSnapshot(own.replicated, nullptr);
  } else {
    if (const Snapshot* mine = own.Find(decision.key)) snapshot = *mine;
    source =
        static_cast<int>(std::find_if(holdings.begin(), holdings.end(), holds) - holdings.begin());
  }
  if (!chosen || !std::all_of(holdings.begin(), holdings.end(), holds)) {
    snapshot = plugin::BroadcastSnapshot(own.world, snapshot, source);
  }
  std::vector<std::uint8_t> part;
  if (chosen) part = own.FetchPart(holdings, &decision.key, generation);
  // Nobody goes on before everybody has read, so that no part is dropped too early.
  own.world->barrier()->wait();
  Status loaded = plugin::LoadSnapshot(own.replicated, snapshot);
  if (chosen && loaded.ok()) {
    const std::string packed(part.begin(), part.end());
    const Result<Snapshot> own_part = plugin::UnpackSnapshot(packed);
    loaded = own_part ? plugin::LoadSnapshot(own.per_rank, *own_part) : own_part.status();
  }
  own.RefuseOnAll(loaded);
  own.commits.clear();
  if (chosen) own.commits.emplace_back(own.Hold(decision.key), std::move(snapshot));
  own.number = chosen ? decision.key.number : 0;
  own.generation = generation;
  // What a failure made worthless goes first when parts are dropped.
  const std::pair kept(decision.key, own.rank());
  std::erase(own.parts, kept);
  if (chosen) own.parts.push_back(kept);
}

bool State::ThrownOnAll() const { return impl_->thrown_on_all; }

void State::NoteBegun() { impl_->begun = true; }

void State::EndRun() {
  Impl& own = *impl_;
  own.over = true;
  try {
    for (const auto& [key, seat] : own.parts)
      own.world->getStore()->deleteKey(own.PartKey(key, seat));
    own.replica_check.Drop(own.world);
  } catch (const c10::DistError&) {
    // That the run has ended is decided: a failure from here on is one of what comes next.
    return own.parts.clear();
  }
  own.parts.clear();
}

void State::Observe(std::function<void()> observer) { impl_->observer = std::move(observer); }

std::int64_t State::commits() const { return impl_->number; }

const ProcessGroup& State::world() const {
  return impl_->world = plugin::PresentWorld(impl_->world);
}

}  // namespace resilient
