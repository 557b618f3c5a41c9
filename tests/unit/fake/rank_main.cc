// One rank of fake_processes_test.cc: loads libresilient_fake_nccl.so (the first argument) in the
// place of NCCL and CUDA and does what the lines of its input say; each is answered by one line.

#include <dlfcn.h>

#include <cstdio>
#include <cstring>
#include <functional>
#include <iostream>
#include <map>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "runtime/base/check.h"
#include "runtime/base/log.h"
#include "runtime/comm/nccl_library.h"

namespace resilient::testing {
namespace {

std::string ToHex(const NcclUniqueId& id) {
  std::string text;
  for (const char byte : id.bytes) {
    constexpr char kDigits[] = "0123456789abcdef";
    text += kDigits[static_cast<unsigned char>(byte) >> 4];
    text += kDigits[static_cast<unsigned char>(byte) & 15];
  }
  return text;
}

NcclUniqueId FromHex(const std::string& text) {
  NcclUniqueId id;
  for (std::size_t i = 0; i < id.bytes.size(); ++i)
    id.bytes[i] = static_cast<char>(std::stoi(text.substr(2 * i, 2), nullptr, 16));
  return id;
}

class Rank {
 public:
  Rank(const std::string& path, NcclLibrary library)
      : control_(dlopen(path.c_str(), RTLD_NOW | RTLD_NOLOAD)), library_(std::move(library)) {
    RESILIENT_CHECK(control_ != nullptr);
  }

  std::string Do(const std::string& line) {
    std::istringstream words(line);
    std::string verb;
    words >> verb;
    const auto found = verbs_.find(verb);
    RESILIENT_CHECK(found != verbs_.end());
    return found->second(words);
  }

 private:
  using Words = std::istringstream;

  template <typename Function>
  Function Find(const char* name) {
    return reinterpret_cast<Function>(dlsym(control_, name));
  }
  const NcclApi& nccl() const { return library_.nccl; }
  const CudaApi& cuda() const { return library_.cuda; }

  std::string MakeId(Words&) {
    NcclUniqueId id;
    nccl().GetUniqueId(&id);
    return ToHex(id);
  }
  std::string Join(Words& words) {
    int ranks = 0;
    int rank = 0;
    std::string id;
    words >> ranks >> rank >> id;
    if (stream_ == nullptr) cuda().StreamCreateWithFlags(&stream_, kCudaStreamNonBlocking);
    NcclConfig config;
    return Text(nccl().CommInitRankConfig(&comm_, ranks, FromHex(id), rank, &config));
  }
  // The first state that is not in progress.
  std::string Settle(Words&) {
    NcclResult state = NcclResult::kInProgress;
    while (state == NcclResult::kInProgress) {
      nccl().CommGetAsyncError(comm_, &state);
      std::this_thread::yield();
    }
    return Text(state);
  }
  std::string Ask(Words&) {
    NcclResult state = NcclResult::kSuccess;
    nccl().CommGetAsyncError(comm_, &state);
    return Text(state);
  }
  // Returns with the first error.
  std::string AwaitError(Words&) {
    NcclResult state = NcclResult::kSuccess;
    while (state == NcclResult::kSuccess || state == NcclResult::kInProgress) {
      nccl().CommGetAsyncError(comm_, &state);
      std::this_thread::yield();
    }
    return Text(state);
  }
  // Launched, not ended.
  std::string Sum(Words& words) {
    Fill(words);
    nccl().AllReduce(data_.data(), data_.data(), data_.size(), kFloat, NcclReduceOp::kSum, comm_,
                     stream_);
    return Settle(words);
  }
  std::string Send(Words& words) {
    int peer = 0;
    words >> peer;
    Fill(words);
    nccl().Send(data_.data(), data_.size(), kFloat, peer, comm_, stream_);
    return Settle(words);
  }
  std::string Recv(Words& words) {
    int peer = 0;
    words >> peer;
    Fill(words);
    nccl().Recv(data_.data(), data_.size(), kFloat, peer, comm_, stream_);
    return Settle(words);
  }
  void Fill(Words& words) {
    std::size_t count = 0;
    float value = 0;
    words >> count >> value;
    data_.assign(count, value);
  }
  // Waits for the stream; the one value of all elements.
  std::string Result(Words&) {
    CudaEventHandle event = nullptr;
    cuda().EventCreateWithFlags(&event, kCudaEventDisableTiming);
    cuda().EventRecord(event, stream_);
    cuda().EventSynchronize(event);
    cuda().EventDestroy(event);
    for (const float value : data_) {
      if (value != data_.front()) return "mixed";
    }
    return StrCat(data_.front());
  }
  std::string Abort(Words&) { return Text(nccl().CommAbort(comm_)); }
  std::string Destroy(Words& words) {
    nccl().CommFinalize(comm_);
    const std::string state = Settle(words);
    nccl().CommDestroy(comm_);
    return state;
  }
  std::string Change(Words& words) {
    std::string script;
    std::getline(words, script);
    return StrCat(Find<int (*)(const char*)>("resilient_fake_change")(script.c_str()));
  }
  std::string Wait(Words& words) {
    std::string name;
    int at_least = 0;
    words >> name >> at_least;
    return StrCat(Find<int (*)(const char*, int)>("resilient_fake_wait")(name.c_str(), at_least));
  }
  std::string Counts(Words&) { return Find<const char* (*)()>("resilient_fake_counts")(); }
  static std::string Text(NcclResult result) { return StrCat(static_cast<int>(result)); }

  static constexpr NcclDataType kFloat = NcclDataType::kFloat32;

  void* const control_;
  const NcclLibrary library_;
  NcclCommHandle comm_ = nullptr;
  CudaStreamHandle stream_ = nullptr;
  std::vector<float> data_;
  const std::map<std::string, std::function<std::string(Words&)>> verbs_ = {
      {"id", [this](Words& words) { return MakeId(words); }},
      {"join", [this](Words& words) { return Join(words); }},
      {"settle", [this](Words& words) { return Settle(words); }},
      {"ask", [this](Words& words) { return Ask(words); }},
      {"await_error", [this](Words& words) { return AwaitError(words); }},
      {"sum", [this](Words& words) { return Sum(words); }},
      {"send", [this](Words& words) { return Send(words); }},
      {"recv", [this](Words& words) { return Recv(words); }},
      {"result", [this](Words& words) { return Result(words); }},
      {"abort", [this](Words& words) { return Abort(words); }},
      {"destroy", [this](Words& words) { return Destroy(words); }},
      {"change", [this](Words& words) { return Change(words); }},
      {"wait", [this](Words& words) { return Wait(words); }},
      {"counts", [this](Words& words) { return Counts(words); }},
  };
};

}  // namespace
}  // namespace resilient::testing

int main(int, char** arguments) {
  auto library = resilient::LoadNcclLibrary({.nccl = arguments[1], .cuda_runtime = arguments[1]});
  RESILIENT_CHECK(library.ok());
  resilient::testing::Rank rank(arguments[1], *std::move(library));
  for (std::string line; std::getline(std::cin, line);) std::cout << rank.Do(line) << std::endl;
  return 0;
}
