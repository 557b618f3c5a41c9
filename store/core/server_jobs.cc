#include <algorithm>
#include <string>
#include <vector>

#include <resilient/ladder.h>

#include "runtime/base/check.h"
#include "store/core/server_impl.h"

// The jobs of the server: which are there, when one is made, and when it is forgotten.
namespace resilient::store {
namespace {

// A process that others see each beat counts as alive for so long: those who see it may be silent
// for a lease themselves.
constexpr int kPresenceBeats = kHeartbeatsPerLease + 1;
constexpr int kSpareLeases = 6;  // So long spares wait for the next world when theirs has ended.

}  // namespace

bool ServerCore::Impl::MayForget(SessionId id) {
  const Session* session = sessions_.Find(id);
  Job* job = session != nullptr ? FindJob(session->hello.job) : nullptr;
  return job != nullptr && !session->Connected() && !leases_.Has(id) && !job->membership.Needs(id);
}

void ServerCore::Impl::ForgetSession(SessionId id, Effects& effects) {
  const auto job = jobs_.find(sessions_.Find(id)->hello.job);
  sessions_.Forget(id);
  job->second.membership.Forget(id);
  job->second.membership.Keep();
  if (!sessions_.Has(job->first) && job->second.keys.keys() == 0) ForgetJob(job, effects);
}

void ServerCore::Impl::MakeRoomForSession(const Hello& hello, Effects& effects) {
  if (!sessions_.IsFull(hello)) return;
  const std::optional<SessionId> one =
      sessions_.Expendable(hello.job, [this](SessionId id) { return MayForget(id); });
  if (one) ForgetSession(*one, effects);
}

void ServerCore::Impl::ForgetIdle(Instant now, Effects& effects) {
  for (const SessionId id : sessions_.Idle(now)) {
    if (MayForget(id)) ForgetSession(id, effects);
  }
  // What an admin has asked for, or has emptied, leaves none behind.
  for (auto next = jobs_.begin(); next != jobs_.end();) {
    const auto job = next++;
    const Keyspace& keys = job->second.keys;
    if (!sessions_.Has(job->first) && keys.keys() == 0 && keys.waits() == 0)
      ForgetJob(job, effects);
  }
}

void ServerCore::Impl::ForgetJob(Jobs::iterator job, Effects& effects) {
  generation_floor_ = std::max(generation_floor_, job->second.membership.generation());
  std::vector<EndedWait> ended;  // Of admins.
  job->second.keys.EndWaits(
      0, Status(StatusCode::kNotFound, "the job " + job->first + " is forgotten: it has no key"),
      /*of_survivors=*/true, ended);
  AnswerWaits(ended, effects);
  job->second.membership.RemoveRows();
  jobs_.erase(job);
}

Job* ServerCore::Impl::FindJob(const std::string& name) {
  const auto job = jobs_.find(name);
  return job == jobs_.end() ? nullptr : &job->second;
}

const Job* ServerCore::Impl::FindJob(const std::string& name) const {
  return const_cast<Impl*>(this)->FindJob(name);
}

Result<Job*> ServerCore::Impl::MakeJob(const std::string& name) {
  if (Job* job = FindJob(name)) return job;
  if (name.empty()) return Status(StatusCode::kInvalidArgument, "name a job");
  RESILIENT_RETURN_IF_ERROR(CheckRoomForJob());
  return AddJob(name);
}

Status ServerCore::Impl::CheckRoomForJob() const {
  if (jobs_.size() < options_.limits.jobs) return {};
  return Status(StatusCode::kResourceExhausted,
                "the store serves " + std::to_string(jobs_.size()) +
                    " jobs, the most it can; use another store or try again later");
}

Job* ServerCore::Impl::AddJob(const std::string& name) {
  if (Job* job = FindJob(name)) return job;
  const MembershipLimits limits{
      options_.lone_close_grace,      options_.ping_grace,
      options_.exit_report_grace,     kPresenceBeats * leases_.ttl() / kHeartbeatsPerLease,
      options_.limits.worlds_per_job, options_.limits.seats_per_job,
      kSpareLeases * leases_.ttl()};
  KeyspaceLimits key_limits;
  key_limits.keys = options_.limits.keys_per_job;
  key_limits.bytes = options_.limits.bytes_per_job;
  key_limits.queue_items = options_.limits.queue_items;
  key_limits.changes = options_.changes_per_job;
  Job& job = jobs_
                 .try_emplace(name, name, key_limits, pools_, limits, generation_floor_,
                              options_.make_secret, &journal_)
                 .first->second;
  job.membership.Keep();
  return &job;
}

}  // namespace resilient::store
