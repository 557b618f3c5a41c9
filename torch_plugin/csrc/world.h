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

// kSetting for what no world can be resized to.
Status CheckMinWorld(int min_world);
Status CheckMaxWorld(int max_world);

// The world's group as it is now, of what it was before or is; another's unchanged. See
// present_world.
ProcessGroup PresentWorld(ProcessGroup world);

// The same behind a rebuild, with the numbers that the world has by now. Where these have changed
// and cannot in place, or shall not, it is another one, to which the one before gives way
// (ResilientBackend): with the same name, description, store, options and bound device, over the
// same session. What another backend has served in the one before is in it no more. For the thread
// that has rebuilt, before it starts an operation.
ProcessGroup FollowWorld(const ProcessGroup& world, bool in_place = ResilientBackend::kCanFollow);

// SessionContext::Rebuild, behind which present_world has the present rank and size. Blocks.
Status RebuildWorld(const ProcessGroup& world, std::optional<Duration> budget = std::nullopt,
                    int min_world = 0, std::optional<Duration> seat_wait = std::nullopt);

}  // namespace resilient::plugin
