#include <algorithm>

#include "store/core/membership.h"

// Who decides together in an exchange of survivors.
namespace resilient::store {

Status Membership::Acknowledge(SessionId session, std::uint64_t generation,
                               MembershipEffects& effects) {
  RESILIENT_RETURN_IF_ERROR(Standing(session));
  Participant* who = Find(session);
  if (!who || who->state != State::kSeated || who->since >= generation) return {};
  who->since = generation;
  Changed(*who);
  effects.gone_on = true;
  return {};
}

bool Membership::HaveSurvivorsCome(std::uint64_t round, const Gathering& gathering) const {
  const auto found = worlds_.find(round);
  if (found == worlds_.end()) return false;  // Its waits end otherwise.
  const Seats& seats = found->second.seats;
  const auto awaited = [&](const Seat& seat) {
    if (!seat.Live() || gathering.HasCome(seat.session)) return false;
    const Participant* who = Find(seat.session);
    return who && who->since != 0 && who->since <= gathering.survivors_of();
  };
  // Where ranks come in their order the next one is the first that is missing.
  const std::size_t next = static_cast<std::size_t>(gathering.last_rank() + 1) % seats.size();
  const auto middle = seats.begin() + static_cast<std::ptrdiff_t>(next);
  return std::none_of(middle, seats.end(), awaited) && std::none_of(seats.begin(), middle, awaited);
}

}  // namespace resilient::store
