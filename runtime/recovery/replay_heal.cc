// How the replay layer gets over a broken link: its thread alone does all of this.
#include <algorithm>
#include <numeric>
#include <utility>

#include "runtime/base/log.h"
#include "runtime/recovery/callers.h"
#include "runtime/recovery/flight.h"
#include "runtime/recovery/replay_session.h"

namespace resilient::recovery {
namespace {

constexpr Duration kSlice = std::chrono::milliseconds(100);  // Of a wait that has other ends, too.
constexpr Duration kIdle = std::chrono::seconds(1);
constexpr Duration kAgain = std::chrono::milliseconds(5);

// What each member says first, in as many bytes: how long its summary is, and the summary of one
// that has no groups.
constexpr std::size_t kCardBytes = 256;
constexpr std::size_t kVetoMax = 120;
constexpr char kMeeting[] = "resilient.replay.";

std::string CardOf(const ReplaySummary& summary, std::size_t size) {
  ReplaySummary card{
      .epoch = summary.epoch, .veto = summary.veto.substr(0, kVetoMax), .groups = {}};
  card.groups["size"].next = size;
  std::string bytes = EncodeSummary(card);
  const auto used = static_cast<char>(bytes.size());
  bytes.insert(bytes.begin(), used);
  bytes.resize(kCardBytes);
  return bytes;
}

struct Card {
  ReplaySummary summary;  // Without groups.
  std::size_t size = 0;   // Of the whole summary.
};

// nullopt: of no member that runs this version.
std::optional<Card> ReadCard(std::string_view bytes) {
  const auto used = static_cast<unsigned char>(bytes.front());
  auto summary = DecodeSummary(bytes.substr(1, used));
  if (!summary || summary->groups.count("size") == 0) return std::nullopt;
  const std::size_t size = summary->groups["size"].next;
  if (size > kReplaySummaryMax) return std::nullopt;
  summary->groups.clear();
  return Card{.summary = *std::move(summary), .size = size};
}

bool SameMembers(const Membership& before, const Membership& now) {
  return std::equal(before.members.begin(), before.members.end(), now.members.begin(),
                    now.members.end(), [](const Member& one, const Member& other) {
                      return one.rank == other.rank && one.incarnation == other.incarnation;
                    });
}

}  // namespace

void ReplaySession::Follow() {
  // A rank counts as blocked when all threads of its program are, and this one never is.
  Callers::ExemptThisThread();
  std::uint64_t after = 0;
  for (;;) {
    bool healing = false;
    {
      Lock lock(mutex_);
      if (closing_) return;
      healing = phase_ == Phase::kHealing;
    }
    const Instant now = clock_.Now();
    const auto event =
        inner_->AwaitEvent(after, healing ? Deadline::At(now) : Deadline::After(now, kIdle));
    if (!event.ok()) {
      if (event.status().code() != StatusCode::kTimeout) return;  // Closed.
      if (!healing || Heal()) continue;
      // The fence that was behind it tells more than the first cause.
      if (!inner_->AwaitEvent(after, Deadline::At(now)).ok()) GiveUpReplay("");
      continue;
    }
    after = event->number;
    if (event->kind == SessionEvent::Kind::kFenced) OnFence(*event);
    if (event->kind == SessionEvent::Kind::kRefused || event->kind == SessionEvent::Kind::kFailed) {
      if (healing) GiveUp(event->cause, "");
    }
    if (event->kind == SessionEvent::Kind::kClosed) return;
  }
}

void ReplaySession::OnFence(const SessionEvent& event) {
  std::vector<std::pair<Completion, Status>> over;
  {
    // One lock for both: a Rebuild in between would have its generation given up for this one.
    Lock lock(mutex_);
    // Told and acknowledged by Rebuild before this thread came to it.
    if (event.generation < epoch_ || phase_ == Phase::kFailed) return;
    if (IsLinkFailure(event.cause)) {
      link_fence_ = std::max(link_fence_, event.generation);
      return BeginHealingLocked(event.cause);
    }
    over = GiveUpLocked(event.cause, "");
  }
  for (const auto& [done, status] : over) done(status);
}

void ReplaySession::GiveUp(const Status& cause, const std::string& why) {
  std::vector<std::pair<Completion, Status>> over;
  {
    Lock lock(mutex_);
    over = GiveUpLocked(cause, why);
  }
  for (const auto& [done, status] : over) done(status);
}

// The program meets `cause`, as without this layer, until Rebuild.
std::vector<std::pair<Completion, Status>> ReplaySession::GiveUpLocked(const Status& cause,
                                                                       const std::string& why) {
  std::vector<std::pair<Completion, Status>> over;
  if (phase_ == Phase::kFailed || closing_) return over;
  const bool healing = std::exchange(phase_, Phase::kFailed) == Phase::kHealing;
  first_cause_ = why.empty()
                     ? cause
                     : Status(cause.code(),
                              StrCat(cause.message(), "; what it ended was not run again: ", why),
                              cause.detail());
  aborts_.clear();
  if (healing) {
    for (auto& [name, lane] : lanes_) {
      for (auto& [done, kept] : TakePendingLocked(*lane)) {
        const std::string what = Describe(kept->operation());
        over.emplace_back(std::move(done),
                          kept->number == 0 ? NotStarted(first_cause_, name, what)
                                            : first_cause_.WithOperation(name, kept->number, what));
      }
    }
  }
  changed_.notify_all();
  return over;
}

void ReplaySession::GiveUpReplay(const std::string& why) {
  Status cause;
  {
    Lock lock(mutex_);
    cause = first_cause_;
  }
  GiveUp(cause, why);
}

// One step towards the next generation that all members meet in. False: there will be none.
bool ReplaySession::Heal() {
  const Instant began = clock_.Now();
  {
    Lock lock(mutex_);
    if (heal_by_.ExpiredAt(began)) {
      lock.unlock();
      EndMeeting();
      GiveUpReplay("not all members have met in time");
      return true;
    }
  }
  // Whoever is still on the way into the session inside would be let into the next generation,
  // ahead of what is run again there.
  if (!AwaitNobodyInside()) return true;
  // A refusal is the program's to meet, whether or not this thread has come to its event.
  const Status rebuilt =
      inner_->Rebuild({.deadline = Deadline::After(began, kSlice), .again = false});
  if (rebuilt.code() == StatusCode::kTimeout) return true;
  if (!rebuilt.ok()) return false;
  const Membership now = inner_->acknowledged();
  {
    Lock lock(mutex_);
    // The next fence has been told already, or is on its way to this thread.
    if (now.generation <= link_fence_) {
      changed_.wait_for(lock, kAgain);
      return true;
    }
  }
  if (SameMembers(acknowledged_, now)) {
    MeetAndRunAgain(now);
  } else {
    GiveUpReplay("a member was replaced meanwhile");
  }
  return true;
}

void ReplaySession::MeetAndRunAgain(const Membership& now) {
  std::vector<ReplaySummary> all;
  switch (Meet(now, &all)) {
    case Met::kNotYet:
      return;
    case Met::kNever:
      return GiveUpReplay("a member runs another version of this");
    case Met::kYes:
      const ReplayPlan plan = PlanReplay(all);
      if (!plan.refusal.empty()) return GiveUpReplay(plan.refusal);
      (void)RunAgain(now, all, plan);
  }
}

// Calls that the fence has ended return soon.
bool ReplaySession::AwaitNobodyInside() {
  Lock lock(mutex_);
  return changed_.wait_for(lock, kSlice, [this] { return inside_ == 0 || closing_; }) && !closing_;
}

// ---- The meeting ----

// Made of `now`'s members, once a generation; null the second time.
std::shared_ptr<Group> ReplaySession::MeetingPlace(const Membership& now) {
  std::lock_guard lock(place_mutex_);
  if (place_generation_ == now.generation) return nullptr;
  std::vector<int> ranks(now.members.size());
  std::iota(ranks.begin(), ranks.end(), 0);
  if (place_ != nullptr) place_->Close();
  place_ = nullptr;
  auto place = inner_->CreateGroup(StrCat(kMeeting, now.generation), std::move(ranks));
  if (!place.ok()) return nullptr;
  place_generation_ = now.generation;
  return place_ = *place;
}

// The others may have heard this member's part while it has not heard theirs, and go on by it: the
// generation ends, for a reason behind which nothing is run again, before this member begins anew.
void ReplaySession::EndMeeting() {
  std::shared_ptr<Group> place;
  {
    std::lock_guard lock(place_mutex_);
    if (place_generation_ == inner_->membership().generation) place = place_;
  }
  if (place != nullptr) place->Abort("not all members have met in time");
}

Status ReplaySession::Offer(Group& place, const std::shared_ptr<Meeting>& meeting, std::size_t size,
                            bool binding) {
  meeting->heard.resize(meeting->said.size() * size);
  Operation gather;
  gather.kind = OpKind::kAllGather;
  gather.data = meeting->said.data();
  gather.count = meeting->said.size();
  gather.binding = binding;
  for (std::size_t rank = 0; rank < size; ++rank) {
    gather.outputs.push_back({meeting->heard.data() + rank * gather.count, gather.count});
  }
  return place
      .Submit(std::move(gather),
              [this, meeting](const Status& status) {
                Lock lock(mutex_);
                meeting->status = status;
                meeting->ended = true;
                changed_.notify_all();
              })
      .status();
}

// What all have said, in rank order; nullopt: not in this generation.
std::optional<std::string> ReplaySession::Gather(Group& place, std::string said, std::size_t size) {
  const auto meeting = std::make_shared<Meeting>();
  meeting->said = std::move(said);
  if (!Offer(place, meeting, size, /*binding=*/true).ok()) return std::nullopt;
  Lock lock(mutex_);
  while (!meeting->ended && !closing_ && !heal_by_.ExpiredAt(clock_.Now())) {
    changed_.wait_for(lock, kSlice);
  }
  if (!meeting->ended || !meeting->status.ok()) return std::nullopt;
  return meeting->heard;
}

ReplaySession::Met ReplaySession::Meet(const Membership& now, std::vector<ReplaySummary>* all) {
  const std::shared_ptr<Group> place = MeetingPlace(now);
  if (place == nullptr) {
    // It has failed in this generation, whose fence is on its way.
    Lock lock(mutex_);
    changed_.wait_for(lock, kAgain);
    return Met::kNotYet;
  }
  ReplaySummary own;
  {
    Lock lock(mutex_);
    own = SummaryLocked();
  }
  std::string said = EncodeSummary(own);
  if (said.size() > kReplaySummaryMax) {
    own.veto = "it has too many groups and messages to tell of";
    said.clear();
  }
  const std::size_t size = now.members.size();
  const auto cards = Gather(*place, CardOf(own, said.size()), size);
  if (!cards) return Met::kNotYet;
  std::vector<std::size_t> sizes;
  bool vetoed = false;
  for (std::size_t rank = 0; rank < size; ++rank) {
    auto card = ReadCard(std::string_view(*cards).substr(rank * kCardBytes, kCardBytes));
    if (!card) return Met::kNever;
    vetoed = vetoed || !card->summary.veto.empty() || card->summary.epoch != own.epoch;
    sizes.push_back(card->size);
    all->push_back(std::move(card->summary));
  }
  if (vetoed) return Met::kYes;  // All know why from the cards.
  const std::size_t longest = *std::max_element(sizes.begin(), sizes.end());
  said.resize(longest);
  const auto heard = Gather(*place, std::move(said), size);
  if (!heard) return Met::kNotYet;
  for (std::size_t rank = 0; rank < size; ++rank) {
    auto summary = DecodeSummary(std::string_view(*heard).substr(rank * longest, sizes[rank]));
    if (!summary) return Met::kNever;
    (*all)[rank] = *std::move(summary);
  }
  return Met::kYes;
}

// Whoever heals there needs to hear that this member does not. Nobody waits for the end of it here,
// but it has one only when all members have said something: newcomers, too.
void ReplaySession::OfferVeto(const Membership& now) {
  const std::shared_ptr<Group> place = MeetingPlace(now);
  if (place == nullptr) return;
  ReplaySummary own{.epoch = now.generation, .veto = "its program begins anew there", .groups = {}};
  const auto meeting = std::make_shared<Meeting>();
  meeting->said = CardOf(own, 0);
  // Refused: the generation is over.
  (void)Offer(*place, meeting, now.members.size(), /*binding=*/false);
}

ReplaySummary ReplaySession::SummaryLocked() const {
  ReplaySummary own{.epoch = epoch_, .veto = veto_, .groups = {}};
  for (const auto& [name, lane] : lanes_) {
    GroupSummary group = lane->log.Summary();
    group.instance = lane->instance;
    group.ranks = lane->ranks;
    if (name == kWorldGroup) {
      group.ranks.resize(acknowledged_.members.size());
      std::iota(group.ranks.begin(), group.ranks.end(), 0);
    }
    own.groups[name] = std::move(group);
  }
  // The members to which a closed one is still open must not take it for not made yet.
  for (const auto& [name, made] : instances_) {
    if (lanes_.count(name) == 0) own.groups[name].instance = made + 1;
  }
  return own;
}

// ---- Running again ----

// False: a fence has come in between.
bool ReplaySession::RunAgain(const Membership& now, const std::vector<ReplaySummary>& all,
                             const ReplayPlan& plan) {
  std::vector<Completion> over;
  std::vector<std::pair<LanePtr, Kept>> run;
  std::uint64_t ended = 0;
  {
    Lock lock(mutex_);
    ended = link_fence_;
    acknowledged_ = now;  // Before the program sees any result of this generation.
    run = ToRunLocked(all, plan, &over);
  }
  for (const Completion& done : over) done(Status::Ok());
  for (const auto& [lane, kept] : run) {
    if (!StartAgain(lane, kept)) return false;
  }
  RESILIENT_LOG(kWarn, "a link broke in generation ", ended,
                ", with all members alive: ", run.size(), " operations of rank ", now.rank,
                " are run again in generation ", now.generation, " (RESILIENT_REPLAY)");
  return StartQueuedAndOpen(now);
}

std::vector<std::pair<ReplaySession::LanePtr, ReplaySession::Kept>> ReplaySession::ToRunLocked(
    const std::vector<ReplaySummary>& all, const ReplayPlan& plan, std::vector<Completion>* over) {
  std::vector<std::pair<LanePtr, Kept>> run;
  for (auto& [name, lane] : lanes_) {
    const auto planned = plan.from.find(name);
    const std::uint64_t from = planned == plan.from.end() ? 1 : planned->second;
    lane->base = from - 1;
    SettleMessagesLocked(*lane, all, over);
    // Those that are run again are the first ones at the new communicator.
    lane->message_base = lane->next_message - 1 - lane->messages.size();
    for (auto it = lane->collectives.lower_bound(from); it != lane->collectives.end(); ++it) {
      run.emplace_back(lane, it->second);
    }
    for (const auto& [number, kept] : lane->messages) run.emplace_back(lane, kept);
  }
  return run;
}

// Messages that have arrived, which their sender did not know, are not sent again.
void ReplaySession::SettleMessagesLocked(Lane& lane, const std::vector<ReplaySummary>& all,
                                         std::vector<Completion>* over) {
  const std::map<Stream, std::uint64_t> sent = lane.log.Summary().sent;
  std::map<Stream, std::uint64_t> arrived;
  std::vector<Kept> settled;
  for (const auto& [number, kept] : lane.messages) {
    const Operation& operation = kept->operation();
    if (operation.kind != OpKind::kSend) continue;
    const Stream stream{operation.peer, operation.tag};
    if (arrived.count(stream) == 0) {
      const auto known = sent.find(stream);
      arrived[stream] = ReceivedFrom(all, lane.inner->name(), lane.inner->rank(), stream) -
                        (known == sent.end() ? 0 : known->second);
    }
    if (arrived[stream] == 0) continue;
    --arrived[stream];
    settled.push_back(kept);
  }
  for (const Kept& kept : settled) {
    if (Completion done = kept->TakeDone()) over->push_back(std::move(done));
    NoteEndedLocked(lane, *kept);
  }
}

// False: a fence has come in between; it goes on in the generation behind that.
bool ReplaySession::StartAgain(const LanePtr& lane, const Kept& kept) {
  bool ended = false;
  {
    Lock lock(mutex_);
    if (lane->closed) return true;  // Who closed it has ended what was pending.
    ended = kept->ended();
    kept->in_flight = !ended;
  }
  Result<std::uint64_t> seq = Status(StatusCode::kInternal, "not submitted");
  if (ended) {
    // Others need this rank's part; what comes of it is known here.
    const auto scratch = std::make_shared<std::vector<Buffer>>();
    seq = lane->inner->Submit(kept->IntoScratch(scratch.get()), [scratch, kept](const Status&) {});
  } else {
    seq = lane->inner->Submit(ToSubmit(*kept, kept->Again()), Wrap(lane, kept));
  }
  Completion missed;
  Completion refused;
  {
    Lock lock(mutex_);
    if (seq.ok()) NoteStartedLocked(*lane, kept, *seq);
    if (!seq.ok() && !ended) kept->in_flight = false;
    missed = TakeMissedLocked(*lane, *kept);
  }
  if (missed) missed(Status(StatusCode::kCancelled, "its group was closed"));
  if (seq.ok()) return true;
  if (!inner_->failure().ok()) return false;
  // For a reason of its own, as it would have been refused at once.
  {
    Lock lock(mutex_);
    veto_ = StrCat("an operation of group '", lane->inner->name(), "' was refused there");
    refused = kept->TakeDone();
  }
  if (refused) refused(seq.status());
  return true;
}

// Then operations start by themselves again.
bool ReplaySession::StartQueuedAndOpen(const Membership& now) {
  for (;;) {
    LanePtr lane;
    Kept kept;
    std::vector<std::pair<LanePtr, std::string>> aborts;
    {
      Lock lock(mutex_);
      const auto waiting = std::find_if(lanes_.begin(), lanes_.end(), [](const auto& entry) {
        return !entry.second->queue.empty();
      });
      if (waiting == lanes_.end()) {
        if (closing_ || phase_ != Phase::kHealing) return false;
        if (link_fence_ >= now.generation) return false;
        phase_ = Phase::kOpen;
        first_cause_ = {};
        aborts = std::exchange(aborts_, {});
        changed_.notify_all();
      } else {
        lane = waiting->second;
        kept = lane->queue.front();
      }
    }
    if (lane == nullptr) {
      for (const auto& [aborted, why] : aborts) aborted->inner->Abort(why);
      return true;
    }
    if (!StartAgain(lane, kept)) return false;
    Lock lock(mutex_);
    if (!lane->queue.empty() && lane->queue.front() == kept) lane->queue.pop_front();
  }
}

}  // namespace resilient::recovery
