#pragma once

#include <cstdint>

#include <resilient/status.h>

#include "store/core/messages.h"

namespace resilient::store {

// The number that a reply carries, or why there is none.
inline Result<std::int64_t> NumberOf(const Result<Reply>& reply) {
  if (!reply.ok()) return reply.status();
  return reply->number;
}

}  // namespace resilient::store
