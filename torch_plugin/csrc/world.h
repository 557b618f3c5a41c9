#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <c10/util/intrusive_ptr.h>
#include <resilient/status.h>
#include <resilient/torch.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "torch_plugin/csrc/backend.h"
#include "torch_plugin/csrc/context.h"

namespace resilient::plugin {

// The session behind the store that a group was given; kFailedPrecondition when its innermost store
// is none of ours.
Result<std::shared_ptr<SessionContext>> ContextOf(const c10::intrusive_ptr<c10d::Store>& store);

// The session as its users hold it: keeps the whole context alive.
std::shared_ptr<Session> SharedSession(const std::shared_ptr<SessionContext>& context);

// That of a group of ours; kFailedPrecondition for another's.
Result<std::shared_ptr<SessionContext>> ContextOf(const ProcessGroup& group);

// kSetting for what no world can be resized to, and where this version of torch cannot follow.
Status CheckMinWorld(int min_world);
Status CheckMaxWorld(int max_world);

// SessionContext::Rebuild, behind which the world's group has its present rank and size. Blocks.
Status RebuildWorld(const ProcessGroup& world, std::optional<Duration> budget = std::nullopt,
                    int min_world = 0, std::optional<Duration> seat_wait = std::nullopt);

}  // namespace resilient::plugin
