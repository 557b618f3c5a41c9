#include <algorithm>
#include <utility>

#include "runtime/base/check.h"
#include "runtime/base/device_sharing.h"
#include "store/core/device_claims.h"
#include "store/core/membership.h"

namespace resilient::store {
namespace {

constexpr std::size_t kMemberBytes = 24;  // Of a member in a view, besides its texts.

std::size_t Bytes(const Hello& hello, const JoinRequest& request) {
  return request.endpoint.size() + hello.process.host.size() + hello.incarnation.size() +
         kMemberBytes;
}

// A join asks for another world size than that of the world that is there. `both` names the two.
Status OtherSize(const std::string& both, const Participant& who, const FailureDetail& detail) {
  const std::string sizes =
      std::to_string(who.request.world_size) + " and " + std::to_string(who.wanted_size);
  if (who.request.min_world > 0) {
    return Status(StatusCode::kWorldSize,
                  both + " want worlds of different size: " + sizes +
                      "; the others have gone on without this rank, which came too late",
                  detail);
  }
  return Status(StatusCode::kWorldSize,
                both + " want worlds of different size: " + sizes +
                    "; start all ranks with one WORLD_SIZE, or give each job its own name "
                    "(RESILIENT_JOB) or MASTER_PORT",
                detail);
}

}  // namespace

Status Membership::Join(SessionId session, const Hello& hello, const JoinRequest& request,
                        Moment moment, MembershipEffects& effects) {
  Participant* known = Find(session);
  if (known && known->state == State::kLost) {
    effects.Tell(session, SessionLostEvent{known->out});
    return known->out;
  }
  if (known && known->state == State::kLeft) {
    return Status(StatusCode::kFailedPrecondition,
                  "this session has left the job; open a new one to join again");
  }
  const bool is_new = known == nullptr;
  Participant& who = participants_[session];
  if (is_new) {
    who.session = session;
    who.hello = hello;
    who.request = request;
    by_process_[{hello.process.boot_id, hello.process.pid}].insert(session);
    ++active_;
    effects.granted.push_back(session);
    PushHolds(session, moment, effects);
  }
  who.last_seen = moment.now;
  Changed(who);
  if (const Status invalid = CheckRequest(who, request); !invalid.ok()) {
    effects.Tell(session, JoinRefusedEvent{invalid, request.number});
    return {};
  }
  World* world = who.state == State::kSeated ? WorldOf(who) : nullptr;
  const int held_rank = std::exchange(who.request, request).rank;
  // Also where its ranks have been numbered anew since it asked, or it was given another seat.
  if (world) {
    who.request.rank = held_rank;
    who.request.world_size = world->size();
  }
  if (who.state == State::kSpare) who.request.rank = kSpareRank;
  if (world) {
    JoinAgain(*world, who, moment, effects);
  } else if (who.state != State::kWaiting && who.state != State::kSpare) {
    Place(who, moment, effects);
  }
  Settle(moment, effects);
  return {};
}

std::size_t Membership::BytesInView(const Participant& who) {
  return Bytes(who.hello, who.request);
}

Status Membership::CheckRoomInView(const Hello& hello, const JoinRequest& request, int size) {
  const std::size_t bytes = Bytes(hello, request);
  const std::size_t most = kViewBytesMax / static_cast<std::size_t>(size);
  if (bytes <= most) return {};
  return Status(StatusCode::kTooLarge,
                "rank " + std::to_string(request.rank) + " takes " + std::to_string(bytes) +
                    " bytes of a view (endpoint " + std::to_string(request.endpoint.size()) +
                    ", host name " + std::to_string(hello.process.host.size()) +
                    "); in a world of " + std::to_string(size) + " each rank may take " +
                    std::to_string(most) + ": shorten its host name, or let fewer ranks join");
}

Status Membership::CheckRequest(const Participant& who, const JoinRequest& request) const {
  const World* world = who.state == State::kSeated ? WorldOf(who) : nullptr;
  const bool is_rank = request.rank >= 0 && request.rank < request.world_size;
  if (request.world_size < 1 || request.world_size > kWorldSizeMax ||
      (!is_rank && request.rank != kSpareRank)) {
    return Status(StatusCode::kInvalidArgument,
                  "rank " + std::to_string(request.rank) + " of a world of " +
                      std::to_string(request.world_size) + " cannot be; ranks are 0 to " +
                      "world size - 1, and a world has at most " + std::to_string(kWorldSizeMax));
  }
  if (request.endpoint.size() > kEndpointBytesMax) {
    return Status(StatusCode::kTooLarge,
                  "an endpoint of " + std::to_string(request.endpoint.size()) + " bytes; at most " +
                      std::to_string(kEndpointBytesMax) + " are taken");
  }
  if (request.device) RESILIENT_RETURN_IF_ERROR(CheckDeviceClaim(*request.device));
  const int size = world ? std::max(world->size(), request.world_size) : request.world_size;
  RESILIENT_RETURN_IF_ERROR(CheckRoomInView(who.hello, request, size));
  if (request.min_world < 0 || request.min_world > request.world_size) {
    return Status(StatusCode::kInvalidArgument,
                  "a world of at least " + std::to_string(request.min_world) + " of " +
                      std::to_string(request.world_size) + " ranks cannot be");
  }
  if (MayAskAgain(who, request)) return {};
  return Status(StatusCode::kInvalidArgument,
                "this session has joined as rank " + std::to_string(who.request.rank) + " of " +
                    std::to_string(who.request.world_size) + " and cannot become rank " +
                    std::to_string(request.rank) + " of " + std::to_string(request.world_size) +
                    "; open another session");
}

bool Membership::MayAskAgain(const Participant& who, const JoinRequest& request) const {
  const bool same_size = request.world_size == who.request.world_size;
  const bool same_rank = request.rank == who.request.rank;
  const bool any_rank = request.rank == kSpareRank || request.spare_if_taken;
  switch (who.state) {
    case State::kSeated: {
      const World* world = WorldOf(who);
      RESILIENT_CHECK(world != nullptr);
      return world->resized_at > 0 || (same_size && (same_rank || any_rank));
    }
    case State::kWaiting:
      return same_size && same_rank;
    case State::kSpare:
      return same_size && any_rank;
    case State::kRefused:
    case State::kLeft:
    case State::kLost:
      break;
  }
  return true;
}

// A survivor, or a join that was sent twice.
void Membership::JoinAgain(World& world, Participant& who, Moment moment,
                           MembershipEffects& effects) {
  Lengthen(world, who);
  ReopenFor(world, who);
  Seat& seat = SeatOf(world, who);
  const bool fenced = world.phase == Phase::kForming || world.phase == Phase::kRefused;
  if (fenced && seat.state == SeatState::kMember) {
    seat.state = SeatState::kJoined;
    seat.refused = false;
    ++world.joined;
    Changed(world, seat);
  }
  if (world.phase != Phase::kForming) return PushState(who, effects);
  BuildIfComplete(world, effects);
  RefuseIfDue(world, moment, effects);
}

void Membership::Lengthen(World& world, const Participant& who) {
  if (who.request.join_timeout <= world.join_timeout && who.request.seat_wait <= world.seat_wait) {
    return;
  }
  world.join_timeout = std::max(world.join_timeout, who.request.join_timeout);
  world.seat_wait = std::max(world.seat_wait, who.request.seat_wait);
  Changed(world);
}

void Membership::Place(Participant& who, Moment moment, MembershipEffects& effects) {
  who.state = State::kRefused;
  who.holder = 0;
  Changed(who);
  if (!CheckAttempt(who, moment, effects)) return;
  if (who.request.rank == kSpareRank && !(host_left_ && worlds_.empty())) {
    return BecomeSpare(who, moment, effects);
  }
  for (auto& [round, world] : worlds_) {
    if (PlaceIn(world, who, moment, effects)) return;
  }
  if (who.request.spare_if_taken && OthersGoOn(who)) return BecomeSpare(who, moment, effects);
  if (worlds_.size() >= limits_.worlds) {
    return Refuse(who,
                  Status(StatusCode::kResourceExhausted,
                         "the job has " + std::to_string(worlds_.size()) +
                             " worlds at one time, the most that the store keeps"),
                  effects);
  }
  if (!seats_.Fits(static_cast<std::size_t>(who.request.world_size))) {
    return Refuse(who,
                  Status(StatusCode::kResourceExhausted,
                         "a world of " + std::to_string(who.request.world_size) +
                             " ranks has no room: those of the job have " +
                             std::to_string(seats_.taken()) + " seats of the " +
                             std::to_string(seats_.most()) + " that the store keeps for one job (" +
                             std::to_string(seats_.pool() ? seats_.pool()->most : seats_.most()) +
                             " for all); let older worlds end"),
                  effects);
  }
  if (host_left_) {
    // The host would look for its peers at a server of its own: whoever waited here waited alone.
    return Refuse(who,
                  Status(StatusCode::kStoreLost,
                         "the process that hosts this store has left, and the store takes no new "
                         "world; look for the store of the next one"),
                  effects);
  }
  TakeSeat(NewWorld(who, moment, effects), who, moment, effects);
}

// It replaces a process of a world that may still go on, without that seat: there is no other world
// for it before that one has ended.
bool Membership::OthersGoOn(const Participant& who) const {
  return std::any_of(worlds_.begin(), worlds_.end(), [&who](const auto& entry) {
    const World& world = entry.second;
    return world.viewed && !world.incarnations.contains(who.hello.incarnation);
  });
}

// False: this world is none of the joiner's business.
bool Membership::PlaceIn(World& world, Participant& who, Moment moment,
                         MembershipEffects& effects) {
  const bool mine = world.incarnations.contains(who.hello.incarnation);
  if (who.request.world_size != world.size()) {
    // A process may open a second world of another size; a stranger to this world may not.
    if (mine || world.live == 0) return false;
    const Seat* wanted = world.seats.Find(who.request.rank);
    const bool held = wanted != nullptr && wanted->Live();
    const auto live = [](const Seat& seat) { return seat.Live(); };
    const Seat& holder =
        held ? *wanted : *std::find_if(world.seats.begin(), world.seats.end(), live);
    WaitForHolder(world, who, holder.session, moment, effects);
    return true;
  }
  const Seat& seat = world.seats.At(who.request.rank);
  const Participant* last = Find(seat.session);
  // Who left its seat begins something new, whatever has become of the seat.
  if (last && last->state == State::kLeft && last->hello.incarnation == who.hello.incarnation) {
    return false;
  }
  if (seat.Open() && world.phase == Phase::kForming) {
    if (world.viewed) {
      // The others have worked together already: only the newcomer is wrong here.
      if (std::optional<Status> why = SharedDeviceIn(world, &who)) {
        Refuse(who, *std::move(why), effects);
        return true;
      }
    }
    TakeSeat(world, who, moment, effects);
    return true;
  }
  if (!seat.Live()) return false;
  const Participant* holder = Find(seat.session);
  RESILIENT_CHECK(holder != nullptr);
  if (holder->hello.incarnation == who.hello.incarnation) return false;
  WaitForHolder(world, who, seat.session, moment, effects);
  return true;
}

bool Membership::CheckAttempt(Participant& who, Moment moment, MembershipEffects& effects) {
  const std::uint64_t attempt = who.hello.launcher_attempt;
  std::vector<std::uint64_t> older;
  for (const auto& [round, world] : worlds_) {
    if (world.launcher_attempt < attempt) older.push_back(round);
    if (world.launcher_attempt <= attempt) continue;
    Refuse(who, Superseded(world.generation, attempt, world.launcher_attempt), effects);
    return false;
  }
  for (const std::uint64_t round : older) SupersedeWorld(round, attempt, moment, effects);
  LoseSparesBefore(attempt, moment, effects);
  return true;
}

void Membership::WaitForHolder(World& world, Participant& who, SessionId holder, Moment moment,
                               MembershipEffects& effects) {
  Participant* other = Find(holder);
  RESILIENT_CHECK(other != nullptr);
  who.state = State::kWaiting;
  who.holder = holder;
  who.wanted_size = world.size();
  Changed(who);
  other->claimants.push_back(who.session);
  effects.log.push_back(Record("claim", who,
                               Name(ClaimantOf(who)) + " joins while " + Name(ClaimantOf(*other)) +
                                   " holds a seat; asking whether it is alive"));
  Ping(*other, moment, effects);
  ArmLoneClose(*other, moment.now);
}

// The holder answered: two live processes want one seat, or worlds of two sizes.
void Membership::RefuseClaimants(Participant& holder, Moment moment, MembershipEffects& effects) {
  const std::vector<SessionId> claimants = std::exchange(holder.claimants, {});
  for (const SessionId session : claimants) {
    Participant* who = Find(session);
    if (!who || who->state != State::kWaiting || who->holder != holder.session) continue;
    if (who->request.spare_if_taken) {
      BecomeSpare(*who, moment, effects);
      continue;
    }
    const std::string both =
        Name(ClaimantOf(*who), true) + " and " + Name(ClaimantOf(holder), true);
    FailureDetail detail;
    detail.rank = holder.request.rank;
    detail.host = holder.hello.process.host;
    detail.pid = holder.hello.process.pid;
    if (who->wanted_size != who->request.world_size) {
      Refuse(*who, OtherSize(both, *who, detail), effects);
    } else {
      Refuse(*who,
             Status(StatusCode::kDuplicateRank,
                    both + " are both alive and claim rank " + std::to_string(who->request.rank) +
                        "; start each rank once, or give each job its own name (RESILIENT_JOB) or "
                        "MASTER_PORT",
                    detail),
             effects);
    }
  }
}

void Membership::ReplaceClaimants(Participant& holder) {
  for (const SessionId session : std::exchange(holder.claimants, {})) {
    to_replace_.push_back(session);
  }
}

void Membership::Settle(Moment moment, MembershipEffects& effects) {
  MindSpares(moment);
  while (!to_replace_.empty()) {
    Participant* who = Find(to_replace_.front());
    to_replace_.pop_front();
    if (who && who->state == State::kWaiting) Place(*who, moment, effects);
    if (who && who->state == State::kSpare && who->claim >= 0) TakeClaim(*who, moment, effects);
    MindSpares(moment);
  }
}

void Membership::Occupy(World& world, Participant& who, MembershipEffects& effects) {
  Seat& seat = world.seats.At(who.request.rank);
  Seat taken;
  taken.announced = seat.announced;  // Until its process says otherwise.
  taken.texts = std::move(seat.texts);
  taken.texts.Make().note.clear();
  if (world.incarnations.insert(who.hello.incarnation).second) {
    taken.texts.Make().incarnations.push_back(who.hello.incarnation);
  }
  seat = std::move(taken);
  seat.state = SeatState::kJoined;
  seat.session = who.session;
  Changed(world, seat);
  who.state = State::kSeated;
  who.round = world.round;
  who.out = Status();
  Changed(who);
  ++world.live;
  ++world.joined;
  // The seats that are still empty, if any, may have time.
  if (std::exchange(world.shrinking, false)) Changed(world);
  Lengthen(world, who);
  effects.log.push_back(Record("join", who,
                               "joined round " + std::to_string(world.round) + " (" +
                                   std::to_string(world.joined) + " of " +
                                   std::to_string(world.size()) + ")"));
}

void Membership::TakeSeat(World& world, Participant& who, Moment moment,
                          MembershipEffects& effects) {
  Occupy(world, who, effects);
  if (!world.viewed && world.joined == world.seats.size()) {
    // Only now all can be told, and nobody has loaded anything yet.
    if (const std::optional<Status> why = SharedDeviceIn(world)) {
      return RefuseAll(world, *why, effects);
    }
  }
  BuildIfComplete(world, effects);
  RefuseIfDue(world, moment, effects);
}

std::optional<Status> Membership::SharedDeviceIn(const World& world,
                                                 const Participant* newcomer) const {
  std::vector<DeviceHolder> holders;
  holders.reserve(world.seats.size());
  bool any = false;
  const auto add = [&holders, &any](const Participant& who) {
    const auto& device = who.request.device;
    any = any || device;
    const Claimant claimant = ClaimantOf(who);
    holders.push_back({claimant.rank, claimant.process, device ? &*device : nullptr});
  };
  for (const Seat& seat : world.seats) {
    if (newcomer && newcomer->request.rank == world.seats.RankOf(seat)) continue;
    if (seat.Live()) add(*Find(seat.session));
  }
  if (newcomer) add(*newcomer);
  return any ? SharedDevice(holders) : std::nullopt;
}

void Membership::Refuse(Participant& who, Status why, MembershipEffects& effects) {
  who.state = State::kRefused;
  who.holder = 0;
  who.out = std::move(why);
  Changed(who);
  effects.Tell(who.session, JoinRefusedEvent{who.out, who.request.number});
  effects.log.push_back(Record("refused", who, "its join: " + who.out.ToString()));
}

World& Membership::NewWorld(const Participant& who, Moment moment, MembershipEffects& effects) {
  if (life_ == 0 || !AnyoneSeated()) {
    RESILIENT_CHECK(worlds_.empty());  // A world without live seats has ended.
    // No earlier life can have left keys behind before the first one.
    effects.new_life = life_ > 0;
    ++life_;
    rounds_ = 0;
    effects.log.push_back(LogRecord{
        "life", {{"job", job_}, {"life", std::to_string(life_)}}, "a life of the job begins"});
  }
  World& world = worlds_.try_emplace(++rounds_, &seats_).first->second;
  world.round = rounds_;
  world.generation = ++generation_;
  ChangedJob();
  Changed(world);
  world.launcher_attempt = who.hello.launcher_attempt;
  world.seats.Resize(static_cast<std::size_t>(who.request.world_size));
  for (Seat& seat : world.seats) seat.vacant_since = moment.now;
  world.first_join = moment.now;
  SeatThePresent(world);
  CallClaimants();
  return world;
}

}  // namespace resilient::store
