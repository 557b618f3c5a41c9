#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "runtime/base/check.h"
#include "store/core/limits.h"
#include "store/core/membership.h"

namespace resilient::store {

void Membership::OfferRoom(World& world, const Participant& who, const resilient::Report& report,
                           Moment moment, MembershipEffects& effects) {
  if (world.phase != Phase::kRunning || world.live < world.seats.size()) return;
  Seat& seat = SeatOf(world, who);
  if (report.commit <= seat.room_at) return;  // Told again.
  seat.room_at = report.commit;
  Room& room = world.room;
  if (report.commit < room.commit) return;  // Some are further: the next one may be of all.
  if (report.commit > room.commit) room = {report.commit, 0, report.max_world};
  ++room.members;
  room.max_world = std::min(room.max_world, report.max_world);
  if (room.members < world.seats.size() || room.max_world <= world.size()) return;
  const int most = std::min(room.max_world, kWorldSizeMax) - world.size();
  const std::vector<Participant*> newcomers =
      NewcomersFor(world, static_cast<std::size_t>(std::max(most, 0)), effects);
  if (!newcomers.empty()) Grow(world, newcomers, report.commit, moment, effects);
}

std::vector<Participant*> Membership::NewcomersFor(const World& world, std::size_t most,
                                                   MembershipEffects& effects) {
  std::vector<Participant*> newcomers;
  std::vector<Participant*> waiting = WaitingSpares();
  std::erase_if(waiting, [&world](const Participant* who) { return !Fits(world, *who); });
  if (waiting.empty()) return newcomers;
  std::size_t bytes = 0;  // A view names all members in one message.
  for (const Seat& seat : world.seats) bytes += BytesInView(*Find(seat.session));
  for (Participant* who : waiting) {
    if (newcomers.size() == most) break;
    bytes += BytesInView(*who);
    if (bytes > kViewBytesMax) break;
    if (std::optional<Status> why = SharedDeviceIn(world, who)) {
      bytes -= BytesInView(*who);
      Refuse(*who, *std::move(why), effects);
      continue;
    }
    newcomers.push_back(who);
  }
  return newcomers;
}

void Membership::Grow(World& world, const std::vector<Participant*>& newcomers,
                      std::uint64_t commit, Moment moment, MembershipEffects& effects) {
  const std::size_t before = world.seats.size();
  const std::size_t after = before + newcomers.size();
  const ProcessIdentity& first = newcomers.front()->hello.process;
  FailureDetail detail;
  detail.generation = world.generation;
  detail.since_unix_s = moment.wall_s;
  const std::string others =
      newcomers.size() > 1 ? " and " + std::to_string(newcomers.size() - 1) + " more" : "";
  const std::string what = "the world grows from " + std::to_string(before) + " to " +
                           std::to_string(after) + " ranks at commit " + std::to_string(commit) +
                           ", which all have made: the spare on host " + first.host + ", pid " +
                           std::to_string(first.pid) + others + ", takes part";
  FenceWorld(world, Status(StatusCode::kGrowth, what, std::move(detail)), moment, effects);
  world.grown_from = before;
  world.resized_at = world.generation;
  world.seats.Resize(after);
  std::size_t rank = before;
  for (Participant* who : newcomers) {
    who->request.rank = static_cast<int>(rank);
    // Two newcomers may claim one device.
    if (std::optional<Status> why = SharedDeviceIn(world, who)) {
      Refuse(*who, *std::move(why), effects);
      world.seats.Resize(world.seats.size() - 1);
      continue;
    }
    spares_.erase(who->session);
    who->fresh = true;
    Occupy(world, *who, effects);
    ++rank;
  }
  Changed(world);
}

void Membership::NoteFailure(World& world, const Status& cause) {
  if (world.phase != Phase::kForming || world.first_cause.code() != StatusCode::kGrowth) return;
  world.first_cause = cause;
  Changed(world);
}

void Membership::TakeBackGrowth(World& world, MembershipEffects& effects) {
  if (world.grown_from == 0 || world.live == world.seats.size()) return;
  const std::size_t before = std::exchange(world.grown_from, 0);
  for (int rank = static_cast<int>(before); rank < world.size(); ++rank) {
    Seat& seat = world.seats.At(rank);
    world.RememberHoldersOf(seat);
    if (Keeps()) journal_->Remove(SeatRow(job_, world.round, rank));
    Participant* who = seat.Live() ? Find(seat.session) : nullptr;
    if (!who) continue;
    RESILIENT_CHECK(who->fresh);
    --world.live;
    --world.joined;
    Await(*who, effects);
  }
  world.seats.Resize(before);
  Changed(world);
  effects.log.push_back(LogRecord{"growth_taken_back",
                                  {{"job", job_},
                                   {"round", std::to_string(world.round)},
                                   {"generation", std::to_string(world.generation)},
                                   {"ranks", std::to_string(world.size())}},
                                  "somebody was lost before the larger world had begun"});
}

}  // namespace resilient::store
