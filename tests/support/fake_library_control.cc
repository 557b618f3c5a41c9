#include <cstdlib>
#include <functional>
#include <map>
#include <numeric>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "runtime/base/check.h"
#include "runtime/base/json.h"
#include "tests/support/fake_library.h"
#include "tests/support/fake_library_state.h"
#include "tests/support/fake_nccl.h"

namespace resilient::testing {
namespace {

using Change = std::function<void(NcclScript&)>;

std::optional<Change> ChangeOf(std::string_view name, int value) {
  static const std::map<std::string_view, bool NcclScript::*> kSwitches = {
      {"hang_init", &NcclScript::hang_init},         {"hang_launch", &NcclScript::hang_launch},
      {"hold_kernels", &NcclScript::hold_kernels},   {"hang_abort", &NcclScript::hang_abort},
      {"hang_destroy", &NcclScript::hang_destroy},   {"lose_device", &NcclScript::lose_device},
      {"refuse_events", &NcclScript::refuse_events}, {"hang_memory", &NcclScript::hang_memory},
      {"refuse_memory", &NcclScript::refuse_memory}, {"hold_copies", &NcclScript::hold_copies}};
  static const std::map<std::string_view, NcclResult NcclScript::*> kResults = {
      {"init_result", &NcclScript::init_result},
      {"async_error", &NcclScript::async_error},
      {"launch_result", &NcclScript::launch_result}};
  if (const auto found = kSwitches.find(name); found != kSwitches.end())
    return [member = found->second, value](NcclScript& script) { script.*member = value != 0; };
  if (const auto found = kResults.find(name); found != kResults.end()) {
    return [member = found->second, value](NcclScript& script) {
      script.*member = static_cast<NcclResult>(value);
    };
  }
  return std::nullopt;
}

std::optional<std::vector<Change>> Parse(const std::string& text) {
  std::vector<Change> changes;
  std::istringstream words(text);
  for (std::string word; words >> word;) {
    const std::size_t equals = word.find('=');
    if (equals == std::string::npos || equals + 1 == word.size()) return std::nullopt;
    const std::string number = word.substr(equals + 1);
    char* end = nullptr;
    const long value = std::strtol(number.c_str(), &end, 10);
    const auto change = ChangeOf(word.substr(0, equals), static_cast<int>(value));
    if (!change || *end != 0) return std::nullopt;
    changes.push_back(*change);
  }
  return changes;
}

bool Apply(FakeNccl& fake, const char* script) {
  const auto changes = Parse(script);
  if (!changes) return false;
  fake.ChangeAll([&](NcclScript& one) {
    for (const Change& change : *changes) change(one);
  });
  return true;
}

struct Number {
  const char* name;
  std::function<int(const NcclCounts&)> value;
};

const std::vector<Number>& Numbers() {
  static const auto* const kNumbers = new std::vector<Number>{
      {"communicators", &NcclCounts::communicators},
      {"events", &NcclCounts::events},
      {"allocations", &NcclCounts::allocations},
      {"frees", &NcclCounts::frees},
      {"pinned", &NcclCounts::pinned},
      {"pinned_most", &NcclCounts::pinned_most},
      {"copies", &NcclCounts::copies},
      {"reductions", &NcclCounts::reductions},
      {"aborts_begun", &NcclCounts::aborts_begun},
      {"aborts_ended", &NcclCounts::aborts_ended},
      {"destroyed", &NcclCounts::destroyed},
      {"unique_ids", &NcclCounts::unique_ids},
      {"graphs", &NcclCounts::graphs},
      {"user_objects", &NcclCounts::user_objects},
      {"kernels_begun", [](const NcclCounts& counts) {
         return std::accumulate(counts.kernels_begun.begin(), counts.kernels_begun.end(), 0,
                                [](int sum, const auto& of_rank) { return sum + of_rank.second; });
       }}};
  return *kNumbers;
}

}  // namespace

// Never destroyed: the streams' threads may hang in it for good, and a process that exits does not
// wait for them.
FakeNccl& FakeOfLibrary() {
  static FakeNccl* const kFake = [] {
    auto* fake = new FakeNccl(NcclReach::kProcesses);
    const char* script = std::getenv("RESILIENT_FAKE_NCCL_SCRIPT");
    RESILIENT_CHECK(script == nullptr || Apply(*fake, script));
    return fake;
  }();
  return *kFake;
}

}  // namespace resilient::testing

namespace fake = resilient::testing;

int resilient_fake_change(const char* script) {
  return fake::Apply(fake::FakeOfLibrary(), script) ? 0 : 1;
}

const char* resilient_fake_counts() {
  thread_local std::string text;
  const fake::NcclCounts counts = fake::FakeOfLibrary().Counts();
  std::ostringstream json;
  for (const fake::Number& number : fake::Numbers())
    json << ", \"" << number.name << "\": " << number.value(counts);
  const auto add_texts = [&json](const char* name, const std::vector<std::string>& texts) {
    const char* separator = "";
    json << ", \"" << name << "\": [";
    for (const std::string& one : texts)
      json << std::exchange(separator, ", ") << resilient::JsonString(one);
    json << "]";
  };
  add_texts("misuse", counts.misuse);
  add_texts("configs", counts.configs);
  const char* separator = "";
  json << ", \"priorities\": [";
  for (const int one : counts.priorities) json << std::exchange(separator, ", ") << one;
  text = "{" + json.str().substr(2) + "]}";
  return text.c_str();
}

int resilient_fake_wait(const char* name, int at_least) {
  std::vector<fake::Number> numbers = fake::Numbers();
  numbers.push_back({"misuse", [](const fake::NcclCounts& counts) {
                       return static_cast<int>(counts.misuse.size());
                     }});
  for (const fake::Number& number : numbers) {
    if (std::string_view(name) != number.name) continue;
    const auto is_there = [&](const fake::NcclCounts& counts) {
      return number.value(counts) >= at_least;
    };
    return fake::FakeOfLibrary().WaitFor(is_there) ? 0 : 1;
  }
  return 2;
}
