#include "store/core/server_impl.h"

// What an admin asks the server for.
namespace resilient::store {

bool ServerCore::Impl::IsAdminOp(const Op& op) {
  return std::holds_alternative<HoldOp>(op) || std::holds_alternative<ReleaseOp>(op) ||
         std::holds_alternative<DrainOp>(op);
}

Status ServerCore::Impl::Administer(Exchange& exchange, Effects& effects) {
  if (exchange.role != Role::kAdmin) {
    return Status(StatusCode::kInvalidArgument, "this is asked for over an admin connection");
  }
  const Op& op = exchange.request.op;
  if (const auto* drain = std::get_if<DrainOp>(&op)) return Drain(exchange, drain->force, effects);
  const std::string& name = exchange.session.hello.job;
  Job* job = FindJob(name);
  if (!job) return Status(StatusCode::kNotFound, "this store has no job '" + name + "'");
  const auto* hold = std::get_if<HoldOp>(&op);
  const Result<std::int64_t> count =
      hold ? job->membership.Hold(*hold, exchange.moment, exchange.members)
           : job->membership.Release(std::get<ReleaseOp>(op), exchange.moment, exchange.members);
  if (count) exchange.key.reply.number = *count;
  return count.status();
}

Status ServerCore::Impl::Drain(const Exchange& exchange, bool force, Effects& effects) {
  if (!options_.durable && !force) {
    return Status(StatusCode::kFailedPrecondition,
                  "this store keeps nothing beyond its memory: its jobs would end with it; serve "
                  "with --data, or drain by force");
  }
  const ProcessIdentity& process = exchange.session.hello.process;
  const std::string why =
      "drained by pid " + std::to_string(process.pid) + " on host " + process.host;
  for (const ConnectionId connection : sessions_.ControlConnections()) {
    effects.send.push_back({connection, Event(DrainingEvent{why})});
  }
  effects.log.push_back(LogRecord{"drain", {{"server", server_id_}}, why});
  effects.drain = true;
  return {};
}

}  // namespace resilient::store
