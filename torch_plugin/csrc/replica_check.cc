#include "torch_plugin/csrc/replica_check.h"

#include <algorithm>
#include <sstream>
#include <string_view>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include "torch_plugin/csrc/fnv.h"

namespace resilient::plugin {
namespace {

constexpr std::int64_t kFirst = 2;  // The first one is made of what sync() has made the same.
constexpr std::int64_t kLast = 3;
// Of a larger tensor so much is looked at, in evenly spread pieces.
constexpr std::size_t kWholeBytesMax = std::size_t{1} << 20;
constexpr std::size_t kPieces = 16;
constexpr int kRanksMax = 256;  // Compared with rank 0, evenly spread.
constexpr std::size_t kNamedMax = 5;

void AddSum(Fnv& sum, std::string_view bytes) {
  if (bytes.size() <= kWholeBytesMax) return sum.Add(bytes);
  const std::size_t length = kWholeBytesMax / kPieces;
  for (std::size_t piece = 0; piece < kPieces; ++piece)
    sum.Add(bytes.substr((bytes.size() - length) * piece / (kPieces - 1), length));
}

// A line for each value: its name and the sum of what it is replicated of.
std::string SumsOf(const Snapshot& snapshot, const StateValues& values,
                   const std::set<const void*>& own) {
  std::string sums;
  for (std::size_t i = 0; i < snapshot.entries.size(); ++i) {
    const Snapshot::Entry& entry = snapshot.entries[i];
    const std::vector<at::Tensor> tensors = values[i].read();
    Fnv sum;
    for (std::size_t j = 0; j < entry.tensors.size(); ++j) {
      if (j < tensors.size() && own.count(tensors[j].const_data_ptr()) > 0) continue;
      AddSum(sum, TensorText(entry.tensors[j]));
    }
    sums += c10::str(sum.value(), " ", entry.name, "\n");
  }
  return sums;
}

// Names whose lines are not among those of the other rank.
std::vector<std::string> Differing(const std::string& mine, const std::string& theirs) {
  std::vector<std::string> names;
  std::istringstream lines(mine);
  for (std::string line; std::getline(lines, line);) {
    if (("\n" + theirs).find("\n" + line + "\n") == std::string::npos)
      names.push_back(line.substr(line.find(' ') + 1));
  }
  return names;
}

template <typename Item>
std::string Some(std::vector<Item> items) {
  const std::size_t more = items.size() - std::min(items.size(), kNamedMax);
  items.resize(items.size() - more);
  std::string text = c10::Join(", ", items);
  if (more > 0) text += c10::str(" and ", more, " more");
  return text;
}

}  // namespace

void ReplicaCheck::AfterCommit(const ProcessGroup& world, const KeyOf& key_of, std::int64_t number,
                               const Snapshot& snapshot, const StateValues& values,
                               const std::set<const void*>& own) {
  const std::int64_t before = number - 1;
  if (world->getRank() == 0 && before >= kFirst && before <= kLast)
    Compare(world, key_of(before), before);
  if (number < kFirst || number > kLast || world->getSize() < 2) return;
  const std::string key = c10::str(key_of(number), "/sums/", world->getRank());
  world->getStore()->set(key, SumsOf(snapshot, values, own));
  left_.push_back(key);
}

void ReplicaCheck::Drop(const ProcessGroup& world) {
  for (const std::string& key : std::exchange(left_, {})) world->getStore()->deleteKey(key);
}

void ReplicaCheck::Compare(const ProcessGroup& world, const std::string& prefix,
                           std::int64_t number) {
  if (warned_) return;
  const int step = (world->getSize() + kRanksMax - 1) / kRanksMax;
  std::vector<std::string> keys;
  for (int rank = 0; rank < world->getSize(); rank += step)
    keys.push_back(c10::str(prefix, "/sums/", rank));
  const auto store = world->getStore();
  if (!store->check(keys)) return;
  const std::string mine = store->get_to_str(keys[0]);
  std::vector<int> others;
  std::string theirs;
  for (std::size_t i = 1; i < keys.size(); ++i) {
    const std::string sums = store->get_to_str(keys[i]);
    if (sums == mine) continue;
    if (others.empty()) theirs = sums;
    others.push_back(static_cast<int>(i) * step);
  }
  if (others.empty()) return;
  warned_ = true;
  TORCH_WARN("State: replicated values differ between ranks. At commit ", number,
             " rank 0 and rank ", others.front(), " have different values of ",
             Some(Differing(mine, theirs)), " (ranks that differ from rank 0: ", Some(others),
             "). After a loss a rank may continue with the values of another rank. Make them equal "
             "before each commit (broadcast), or add values that belong to one rank as "
             "State::Part::kPerRank");
}

}  // namespace resilient::plugin
