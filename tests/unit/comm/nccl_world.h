#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "runtime/comm/nccl_communicator.h"
#include "tests/support/fake_nccl.h"
#include "tests/unit/comm/comm_world.h"

namespace resilient::testing {

// Unique ids from rank to rank of one process. Thread: thread-safe.
class LocalIdExchange final : public NcclIdExchange {
 public:
  void Publish(const std::string& key, const NcclUniqueId& id, OnPublished done) override {
    std::vector<OnId> waiting;
    Status refused;
    {
      std::lock_guard lock(mutex_);
      refused = refused_;
      if (refused.ok() && !ids_.emplace(key, id).second) ADD_FAILURE() << key << " was used twice";
      waiting.swap(waiting_[key]);
    }
    done(refused);
    for (const OnId& one : waiting) one(id);
  }
  void Await(const std::string& key, OnId done) override {
    {
      std::lock_guard lock(mutex_);
      const auto found = ids_.find(key);
      if (found == ids_.end()) {
        waiting_[key].push_back(std::move(done));
        return;
      }
      done = [done = std::move(done), id = found->second](const Result<NcclUniqueId>&) {
        done(id);
      };
    }
    done(NcclUniqueId{});
  }
  void Refuse(Status why) {
    std::lock_guard lock(mutex_);
    refused_ = std::move(why);
  }

 private:
  std::mutex mutex_;
  std::map<std::string, NcclUniqueId> ids_;
  std::map<std::string, std::vector<OnId>> waiting_;
  Status refused_;
};

// Where ranks run on the fake, one device each: device number = rank. What is misused or left over
// in the fake at its end fails the test.
class NcclEnvironment final : public Environment {
 public:
  explicit NcclEnvironment(NcclFabricOptions options = {}) : options_(std::move(options)) {
    options_.nccl = FakeNccl::nccl();
    options_.cuda = FakeNccl::cuda();
  }
  ~NcclEnvironment() override {
    streams_.clear();
    const NcclCounts counts = fake.Counts();
    EXPECT_THAT(counts.misuse, ::testing::IsEmpty());
    EXPECT_EQ(counts.communicators, 0);
    EXPECT_EQ(counts.events, 0);
    EXPECT_EQ(counts.allocations, 0);
    EXPECT_EQ(counts.reductions, 0);
  }

  Result<std::unique_ptr<CommunicatorFactory>> Make(const Clock& clock,
                                                    CommunicatorEvents& events) override {
    NcclFabricOptions options = options_;
    options.device = next_device_++;
    return MakeNcclFabric(options, ids, clock, events);
  }
  ExecutionStream NewStream() override {
    CudaStreamHandle stream = nullptr;
    EXPECT_EQ(FakeNccl::cuda().StreamCreateWithFlags(&stream, kCudaStreamNonBlocking),
              CudaResult::kSuccess);
    streams_.emplace_back(stream,
                          [](CudaStreamHandle one) { FakeNccl::cuda().StreamDestroy(one); });
    return stream;
  }
  NcclFabricOptions& options() { return options_; }  // Of the fabrics to come.

  FakeNccl fake;
  LocalIdExchange ids;

 private:
  NcclFabricOptions options_;
  int next_device_ = 0;
  std::vector<std::shared_ptr<CudaStream>> streams_;
};

class NcclTest : public ::testing::Test {
 protected:
  World& Start(int ranks, Duration connect_timeout = kBound,
               Duration flush_timeout = Millis(1000)) {
    environment_->options().connect_timeout = connect_timeout;
    environment_->options().flush_timeout = flush_timeout;
    world_ = std::make_unique<World>(
        Transport{.name = "nccl", .make = nullptr, .environment = [this] { return environment_; }},
        ranks);
    return *world_;
  }
  World& world() { return *world_; }

  // A stream of the fake, until the end of the test.
  CudaStreamHandle NewStream() { return static_cast<CudaStreamHandle>(environment_->NewStream()); }

  void Change(int rank, const std::function<void(NcclScript&)>& change) {
    fake_.Change(rank, change);
  }
  bool WaitForKernels(int rank, int count) {
    return fake_.WaitFor([&](const NcclCounts& counts) {
      const auto begun = counts.kernels_begun.find(rank);
      return begun != counts.kernels_begun.end() && begun->second >= count;
    });
  }
  bool WaitForAborts(int count) {
    return fake_.WaitFor([&](const NcclCounts& counts) { return counts.aborts_ended == count; });
  }

  const std::shared_ptr<NcclEnvironment> environment_ = std::make_shared<NcclEnvironment>();
  FakeNccl& fake_ = environment_->fake;
  LocalIdExchange& ids_ = environment_->ids;
  std::unique_ptr<World> world_;
};

}  // namespace resilient::testing
