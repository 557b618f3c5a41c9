#include <algorithm>
#include <string>
#include <vector>

#include "store/core/server_impl.h"

// One job that was given two names, as by a RESILIENT_JOB that is not the same on all ranks: its
// ranks wait in two jobs, each for those of the other. On a store that serves many jobs, two that
// have nothing to do with each other may look so for a moment. So nothing ends by it: those that
// wait are told.
namespace resilient::store {
namespace {

constexpr Duration kWaited = std::chrono::seconds(2);  // Ranks of one job start together.
constexpr Duration kLookEvery = std::chrono::seconds(1);
constexpr std::size_t kLookedAtMax = 64;  // Jobs that wait; each is compared with each.

}  // namespace

void ServerCore::Impl::LookForCrossedJobs(Moment moment, Effects& effects) {
  if (jobs_.size() < 2 || moment.now < crossed_look_ + kLookEvery) return;
  crossed_look_ = moment.now;
  struct Waiting {
    Job* job;
    const World* world;
  };
  std::vector<Waiting> waiting;
  for (auto& [name, job] : jobs_) {
    const World* world = job.membership.AwaitingFirstJoins(moment.now - kWaited);
    if (world != nullptr) waiting.push_back({&job, world});
    if (waiting.size() == kLookedAtMax) break;
  }
  for (const Waiting& one : waiting) {
    const auto other = std::ranges::find_if(waiting, [&one](const Waiting& each) {
      return each.job != one.job && one.world->IsCrossedWith(*each.world);
    });
    std::string text;
    if (other != waiting.end()) {
      text = "job '" + other->job->membership.job() + "' at this store has " +
             other->job->membership.NameOfFirstJoined(*other->world) +
             " and waits for ranks that are in this job, '" + one.job->membership.job() +
             "': if both are one job, give all of its ranks the same RESILIENT_JOB";
    }
    MembershipEffects members;
    one.job->membership.TellElsewhere(one.world->round, text, members);
    Apply(*one.job, members, moment, effects);
  }
}

}  // namespace resilient::store
