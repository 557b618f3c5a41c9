#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "store/core/causes.h"
#include "store/core/presence_key.h"
#include "store/core/server_impl.h"

namespace resilient::store {
namespace {

LogRecord Record(std::string_view event, const Session& session, std::string text) {
  return LogRecord{event,
                   {{"job", session.hello.job},
                    {"host", session.hello.process.host},
                    {"pid", std::to_string(session.hello.process.pid)}},
                   std::move(text)};
}

}  // namespace

void ServerCore::Impl::LeaseKey(Job& job, const Session& session, Moment moment, Effects& effects) {
  const Hello& hello = session.hello;
  if (const auto leased = job.leased.find(session.id); leased != job.leased.end()) {
    if (leased->second == hello.leased_key) return;
    Unlease(job, session.id, "holds another key", moment, effects);
  }
  if (hello.leased_key.empty()) return;
  // Its seat was lost: it is out.
  if (!job.membership.Standing(session.id).ok()) return sessions_.DropLeasedKey(session.id);
  std::vector<EndedWait> ended;
  const Status set = job.keys.Set(0, hello.leased_key, hello.leased_value, ended);
  if (!set.ok()) {
    effects.log.push_back(Record("unleased", session, "its key is not there: " + set.message()));
    sessions_.DropLeasedKey(session.id);
    return;
  }
  job.keys.AnswerWatches(ended);
  AnswerWaits(ended, effects);
  Hold(job, session);
  leases_.Grant(session.id, moment.now);
  // Harmless when the process is gone, or of another host: the lease decides then.
  effects.watch.push_back({session.id, hello.process});
  effects.log.push_back(Record("present", session, "has the key " + hello.leased_key));
}

void ServerCore::Impl::Hold(Job& job, const Session& session) {
  const Hello& hello = session.hello;
  job.leased.emplace(session.id, hello.leased_key);
  ++job.leases_on[hello.leased_key];
  if (const auto name = ParsePresenceKey(hello.leased_key)) {
    job.membership.OnPresent(session.id, hello.process, *name);
  }
}

void ServerCore::Impl::EndLeasedKey(Job& job, SessionId session, const std::string& how,
                                    Moment moment, Effects& effects) {
  sessions_.DropLeasedKey(session);
  Unlease(job, session, how, moment, effects);
}

void ServerCore::Impl::Unlease(Job& job, SessionId session, const std::string& how, Moment moment,
                               Effects& effects) {
  const auto leased = job.leased.find(session);
  if (leased == job.leased.end()) return;
  const std::string key = std::move(leased->second);
  job.leased.erase(leased);
  // A member keeps its lease until its seat is lost or left.
  if (!job.membership.Needs(session)) leases_.Remove(session);
  effects.unwatch.push_back(session);
  if (const auto leases = job.leases_on.find(key); --leases->second == 0) {
    job.leases_on.erase(leases);
    job.keys.Delete(0, key);
  }
  std::vector<EndedWait> ended;
  job.keys.AnswerWatches(ended);
  AnswerWaits(ended, effects);
  effects.log.push_back(
      Record("absent", *sessions_.Find(session), how + ": its key " + key + " is gone"));
  if (const auto name = ParsePresenceKey(key)) {
    MembershipEffects members;
    job.membership.OnAbsent(session, *name, how, moment, members);
    Apply(job, members, moment, effects);
  }
}

void ServerCore::Impl::EndLeasedKeysOf(Job& job, const ExitReportOp& report, Moment moment,
                                       Effects& effects) {
  std::vector<SessionId> ended;
  for (const auto& [session, key] : job.leased) {
    const bool its = SameProcess(sessions_.Find(session)->hello.process, report.process);
    if (its) ended.push_back(session);
  }
  for (const SessionId session : ended) {
    EndLeasedKey(job, session, HowItEnded(report), moment, effects);
  }
}

void ServerCore::Impl::ExpireLeasedKey(Job& job, const LeaseTable::Expired& expired, Moment moment,
                                       Effects& effects) {
  const SessionId session = expired.session;
  const bool leased = job.leased.contains(session);
  EndLeasedKey(job, session, "sent no heartbeat for " + Seconds(expired.silent) + " s", moment,
               effects);
  const ConnectionId connection = sessions_.Find(session)->control.connection;
  if (!leased || connection == 0 || job.membership.Needs(session)) return;
  effects.close.push_back(connection);
  OnDisconnect(connection, moment, effects);
}

void ServerCore::Impl::SetLeasedKeys(Job& job, std::vector<EndedWait>& ended) {
  for (const auto& [session, key] : job.leased) {
    // There was room for it a moment ago, when more keys were there.
    (void)job.keys.Set(0, key, sessions_.Find(session)->hello.leased_value, ended);
  }
}

void ServerCore::Impl::RestoreLeasedKeys(Moment moment, Effects& effects) {
  for (const SessionId id : sessions_.WithLeasedKey()) {
    const Session& session = *sessions_.Find(id);
    Job* job = FindJob(session.hello.job);
    if (!job) continue;
    Hold(*job, session);
    leases_.Grant(id, moment.now);
    effects.watch.push_back({id, session.hello.process});
  }
}

}  // namespace resilient::store
