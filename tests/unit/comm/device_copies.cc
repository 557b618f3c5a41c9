#include "tests/unit/comm/device_copies.h"

#include <dlfcn.h>

#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "runtime/comm/group_port.h"

namespace resilient::testing {
namespace {

constexpr int kByAddress = 4;  // cudaMemcpyDefault: the addresses say which way.

// The memory of one operation, twice. What touches or overlaps on the host is one block on the
// device, so that parts of one block stay such, and an input that is its own output too. Owner: the
// completion, which is destroyed when the device is done with it. Thread: one at a time.
class Copies {
 public:
  Copies(const CudaApi& cuda, const CudaCopies& copies) : cuda_(cuda), copies_(copies) {}
  Copies(const Copies&) = delete;
  Copies& operator=(const Copies&) = delete;
  ~Copies() {
    for (const auto& [begin, block] : blocks_) EXPECT_EQ(cuda_.Free(block.device), kOk);
  }

  // Makes the memory of `op`, of the rank `rank`, that of the device.
  void Replace(Operation* op, int rank) {
    const std::size_t size = SizeOf(op->dtype);
    if (WritesData(*op, rank)) written_.push_back({.data = op->data, .count = op->count * size});
    for (const Part& part : op->outputs)
      written_.push_back({.data = part.data, .count = part.count * size});
    ForEachPart(op, [&](void** data, std::size_t count) { Note(*data, count * size); });
    Allocate();
    ForEachPart(op, [&](void** data, std::size_t count) {
      if (count > 0) *data = OnDevice(*data);
    });
  }
  // Only what the operation writes: who sends may be gone once all has come.
  void Fetch() const {
    for (const Part& part : written_) {
      if (part.count == 0) continue;
      EXPECT_EQ(copies_.Memcpy(part.data, OnDevice(part.data), part.count, kByAddress), kOk);
    }
  }

 private:
  static constexpr CudaResult kOk = CudaResult::kSuccess;
  struct Block {
    std::uintptr_t end = 0;
    void* device = nullptr;
  };

  template <typename Change>
  static void ForEachPart(Operation* op, const Change& change) {
    if (op->data != nullptr) change(&op->data, op->count);
    for (Part& part : op->inputs) change(&part.data, part.count);
    for (Part& part : op->outputs) change(&part.data, part.count);
  }
  static bool WritesData(const Operation& op, int rank) {
    switch (op.kind) {
      case OpKind::kAllReduce:
      case OpKind::kRecv:
      case OpKind::kScatter:
      case OpKind::kReduceScatter:
        return true;
      case OpKind::kBroadcast:
        return rank != op.root;
      case OpKind::kReduce:
        return rank == op.root;
      case OpKind::kAllGather:
      case OpKind::kBarrier:
      case OpKind::kSend:
      case OpKind::kGather:
      case OpKind::kAllToAll:
        return false;
    }
    return false;
  }
  static void* At(std::uintptr_t address) { return reinterpret_cast<void*>(address); }

  void Note(const void* data, std::size_t bytes) {
    if (bytes == 0) return;
    std::uintptr_t begin = reinterpret_cast<std::uintptr_t>(data);
    std::uintptr_t end = begin + bytes;
    for (auto at = blocks_.begin(); at != blocks_.end();) {
      if (at->first > end || at->second.end < begin) {
        ++at;
        continue;
      }
      begin = std::min(begin, at->first);
      end = std::max(end, at->second.end);
      at = blocks_.erase(at);
    }
    blocks_[begin].end = end;
  }
  void Allocate() {
    for (auto& [begin, block] : blocks_) {
      ASSERT_EQ(cuda_.Malloc(&block.device, block.end - begin), kOk);
      ASSERT_EQ(copies_.Memcpy(block.device, At(begin), block.end - begin, kByAddress), kOk);
    }
    // A copy from memory that is not pinned may be under way still, and streams of tests are in no
    // order with it.
    EXPECT_EQ(copies_.StreamSynchronize(nullptr), kOk);
  }
  void* OnDevice(void* data) const {
    const auto address = reinterpret_cast<std::uintptr_t>(data);
    const auto block = std::prev(blocks_.upper_bound(address));
    return static_cast<char*>(block->second.device) + (address - block->first);
  }

  const CudaApi cuda_;
  const CudaCopies copies_;
  std::map<std::uintptr_t, Block> blocks_;  // By their beginnings on the host.
  std::vector<Part> written_;               // On the host, in bytes.
};

// Owner: a world. Thread: as the one inside.
class DeviceCommunicator final : public Communicator {
 public:
  DeviceCommunicator(std::shared_ptr<Communicator> inner, const CudaApi& cuda,
                     const CudaCopies& copies)
      : inner_(std::move(inner)), cuda_(cuda), copies_(copies) {}

  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  Result<std::uint64_t> Submit(Operation op, Completion done) override {
    Submission one = OnDevice({.op = std::move(op), .done = std::move(done)});
    return inner_->Submit(std::move(one.op), std::move(one.done));
  }
  Result<std::vector<std::uint64_t>> SubmitBatch(std::vector<Submission> batch) override {
    for (Submission& one : batch) one = OnDevice(std::move(one));
    return inner_->SubmitBatch(std::move(batch));
  }
  Result<Ran> Run(Operation op, Completion done, const KeepWaiting& keep_waiting) override {
    Submission one = OnDevice({.op = std::move(op), .done = std::move(done)});
    return inner_->Run(std::move(one.op), std::move(one.done), keep_waiting);
  }
  void Abort(const Status& cause) override { inner_->Abort(cause); }
  bool IsQuiet() const override { return inner_->IsQuiet(); }
  void Leave() override { inner_->Leave(); }
  ProgressAnswer AskProgress(const std::string& transport) override {
    return inner_->AskProgress(transport);
  }
  void NoteAllEntered(const EnteredCall& call) override { inner_->NoteAllEntered(call); }

 private:
  Submission OnDevice(Submission one) const {
    Operation checked = one.op;
    if (!ValidateOperation(checked, rank(), size()).ok()) return one;
    const auto copies = std::make_shared<Copies>(cuda_, copies_);
    copies->Replace(&one.op, rank());
    one.done = [copies, done = std::move(one.done)](const Status& status) {
      if (status.ok()) copies->Fetch();
      done(status);
    };
    return one;
  }

  const std::shared_ptr<Communicator> inner_;
  const CudaApi cuda_;
  const CudaCopies copies_;
};

template <typename Function>
void Find(void* library, const char* name, Function* function) {
  *function = reinterpret_cast<Function>(dlsym(library, name));
}

}  // namespace

CudaCopies FindCudaCopies(const CudaApi& cuda) {
  CudaCopies found;
  Dl_info info;
  if (dladdr(reinterpret_cast<void*>(cuda.Malloc), &info) == 0) return found;
  void* library = dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD);
  if (library == nullptr) return found;
  Find(library, "cudaGetDeviceCount", &found.GetDeviceCount);
  Find(library, "cudaMemcpy", &found.Memcpy);
  Find(library, "cudaStreamSynchronize", &found.StreamSynchronize);
  return found;
}

std::shared_ptr<Communicator> OnDeviceCopies(std::shared_ptr<Communicator> inner,
                                             const CudaApi& cuda, const CudaCopies& copies) {
  return std::make_shared<DeviceCommunicator>(std::move(inner), cuda, copies);
}

}  // namespace resilient::testing
