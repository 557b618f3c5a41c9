#pragma once

#include <cstdint>

#include <resilient/status.h>
#include <resilient/store/client.h>

#include "store/core/messages.h"

namespace resilient::store {

// The number that a reply carries, or why there is none.
inline Result<std::int64_t> NumberOf(const Result<Reply>& reply) {
  if (!reply.ok()) return reply.status();
  return reply->number;
}

inline StatusOp OpOf(const StatusQuery& query) {
  return {query.job, query.from_job, query.from_round, query.from_rank};
}

}  // namespace resilient::store
