#include <algorithm>
#include <csignal>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "runtime/base/log.h"
#include "runtime/base/printable.h"
#include "store/server/command_support.h"

// The commands about the keys of a job.
namespace resilient::store {
namespace {

using nlohmann::json;

volatile std::sig_atomic_t g_stop = 0;

void OnStop(int) { g_stop = 1; }

Status CheckStop() {
  return g_stop == 0 ? Status() : Status(StatusCode::kInterrupted, "stopped by a signal");
}

struct KeyArguments : ClientArguments {
  std::string key;
  std::string value;
  bool json = false;
};

struct ListArguments : ClientArguments {
  std::string prefix;
  std::string after;
  std::size_t limit = 0;
  bool json = false;
};

struct WatchArguments : ClientArguments {
  std::string prefix;
  std::uint64_t from = 0;
  std::uint64_t count = 0;
  bool json = false;
};

int RunGet(const KeyArguments& arguments, const CliContext& context) {
  return WithClient(arguments, context, {}, [&](Client& client, const Client::Call& call) {
    const Result<std::string> value = client.Get(arguments.key, /*wait=*/false, call);
    if (!value.ok()) return value.status();
    // Without --json the bytes alone, so that a value can be piped on.
    Print(!arguments.json ? *value
                          : json{{"key", Printable(arguments.key)},
                                 {"value", Printable(*value)},
                                 {"bytes", value->size()}}
                                    .dump() +
                                "\n");
    return Status::Ok();
  });
}

int RunSet(const KeyArguments& arguments, const CliContext& context) {
  return WithClient(arguments, context, {}, [&](Client& client, const Client::Call& call) {
    RESILIENT_RETURN_IF_ERROR(client.Set(arguments.key, arguments.value, call));
    if (arguments.json) {
      Print(json{{"key", Printable(arguments.key)}, {"bytes", arguments.value.size()}}.dump() +
            "\n");
    }
    return Status::Ok();
  });
}

int RunKeys(const ListArguments& arguments, const CliContext& context) {
  return WithClient(arguments, context, {}, [&](Client& client, const Client::Call& call) {
    const Result<std::vector<std::string>> keys = client.ListKeys(arguments.prefix, call);
    if (!keys.ok()) return keys.status();
    const auto begin = arguments.after.empty()
                           ? keys->begin()
                           : std::upper_bound(keys->begin(), keys->end(), arguments.after);
    const auto rest = static_cast<std::size_t>(keys->end() - begin);
    const std::size_t shown = arguments.limit == 0 ? rest : std::min(rest, arguments.limit);
    json list = json::array();
    std::string lines;
    for (auto key = begin; key != begin + static_cast<std::ptrdiff_t>(shown); ++key) {
      if (arguments.json) {
        list.push_back(Printable(*key));
      } else {
        lines += Printable(*key) + "\n";
      }
    }
    const bool more = shown < rest;
    if (arguments.json) lines = json{{"keys", std::move(list)}, {"more", more}}.dump() + "\n";
    Print(lines);
    if (more && !arguments.json) {
      Complain(StrCat(rest - shown, " keys more; --after goes on behind the last one"), kExitOk);
    }
    return Status::Ok();
  });
}

// The lines of one change; in a snapshot those of a key that is there.
std::string ChangeLine(const KeyChange& change, const WatchBatch& batch, bool as_json) {
  const std::uint64_t revision = batch.snapshot ? batch.revision : change.revision;
  if (as_json) {
    json line = {{"revision", revision}, {"key", Printable(change.key)}};
    if (batch.snapshot) line["snapshot"] = true;
    if (change.value) {
      line["value"] = Printable(*change.value);
    } else {
      line["deleted"] = true;
    }
    return line.dump() + "\n";
  }
  if (!change.value) return StrCat(revision, " deleted ", Printable(change.key), "\n");
  return StrCat(revision, batch.snapshot ? " is " : " set ", Printable(change.key), " ",
                Printable(*change.value), "\n");
}

std::string SnapshotLine(const WatchBatch& batch, bool as_json) {
  if (as_json) {
    return json{{"revision", batch.revision}, {"snapshot_of", batch.changes.size()}}.dump() + "\n";
  }
  return StrCat(batch.revision, " snapshot of ", batch.changes.size(), " keys\n");
}

Status FollowKeys(const WatchArguments& arguments, Client& client) {
  const std::unique_ptr<KeyWatch> watch = client.Watch(arguments.prefix, arguments.from);
  std::uint64_t told = 0;
  while (arguments.count == 0 || told < arguments.count) {
    const Result<WatchBatch> batch = watch->Next(Client::Call());
    if (batch.status().code() == StatusCode::kInterrupted) return Status::Ok();
    if (!batch.ok()) return batch.status();
    std::string lines = batch->snapshot ? SnapshotLine(*batch, arguments.json) : "";
    for (const KeyChange& change : batch->changes) {
      if (!batch->snapshot && arguments.count > 0 && told >= arguments.count) break;
      told += batch->snapshot ? 0 : 1;
      lines += ChangeLine(change, *batch, arguments.json);
    }
    if (!Print(lines)) return Status::Ok();
  }
  return Status::Ok();
}

int RunWatch(const WatchArguments& arguments, const CliContext& context) {
  for (const int number : {SIGINT, SIGTERM}) {
    // One that was ignored, as by nohup or in the background of a script, stays so.
    if (std::signal(number, OnStop) == SIG_IGN) std::signal(number, SIG_IGN);
  }
  return WithClient(arguments, context, CheckStop, [&](Client& client, const Client::Call&) {
    return FollowKeys(arguments, client);
  });
}

void AddGet(CLI::App& app, CliContext& context) {
  auto get = std::make_shared<KeyArguments>();
  CLI::App* command = app.add_subcommand("get", "Print the value of a key of the job");
  AddCommonOptions(*command, context, *get);
  command->add_option("key", get->key, "The key")->required();
  command->add_flag("--json", get->json, "Print JSON; bytes that do not print as \\xNN");
  command->footer(
      "Example: resilient-store get --job train epoch\n"
      "Exit codes: 0 printed; 1 there is no such key, or no answer of a store; 2 bad usage.");
  command->callback([get, &context] { context.exit_code = RunGet(*get, context); });
}

void AddSet(CLI::App& app, CliContext& context) {
  auto set = std::make_shared<KeyArguments>();
  CLI::App* command = app.add_subcommand("set", "Set a key of the job");
  AddCommonOptions(*command, context, *set);
  command->add_option("key", set->key, "The key")->required();
  command->add_option("value", set->value, "The value")->required();
  command->add_flag("--json", set->json, "Print what was set as JSON");
  command->footer(
      "Example: resilient-store set --job train stop yes\n"
      "Exit codes: 0 set; 1 refused, or no answer of a store; 2 bad usage.");
  command->callback([set, &context] { context.exit_code = RunSet(*set, context); });
}

void AddKeys(CLI::App& app, CliContext& context) {
  auto list = std::make_shared<ListArguments>();
  CLI::App* command = app.add_subcommand("keys", "List the keys of the job, sorted");
  AddCommonOptions(*command, context, *list);
  command->add_option("prefix", list->prefix, "Only keys that begin so");
  command->add_option("--after", list->after, "Only keys behind this one");
  command->add_option("--limit", list->limit, "At most so many (default: all)");
  command->add_flag("--json", list->json, "Print JSON: {\"keys\": [...], \"more\": bool}");
  command->footer(
      "Bytes that do not print are shown as \\xNN.\n"
      "Example: resilient-store keys --job train --limit 100 metrics/\n"
      "Exit codes: 0 listed, be it none; 1 no answer of a store; 2 bad usage.");
  command->callback([list, &context] { context.exit_code = RunKeys(*list, context); });
}

void AddWatch(CLI::App& app, CliContext& context) {
  auto watch = std::make_shared<WatchArguments>();
  CLI::App* command =
      app.add_subcommand("watch", "Print the keys of the job and each change, until Ctrl-C");
  AddCommonOptions(*command, context, *watch);
  command->add_option("prefix", watch->prefix, "Only keys that begin so");
  command->add_option("--from", watch->from,
                      "The first revision to tell of (default: the present state first)");
  command->add_option("--count", watch->count, "End after so many changes (default: never)");
  command->add_flag("--json", watch->json, "Print one JSON object a line");
  command->footer(
      "Each change is told once and in order, also over lost connections and restarts of the\n"
      "store; who is further behind than the store remembers gets a new snapshot. --timeout is\n"
      "for the first connection. Bytes that do not print are shown as \\xNN.\n"
      "Example: resilient-store watch --job train metrics/\n"
      "Exit codes: 0 ended by Ctrl-C, SIGTERM or --count; 1 refused, or no answer of a store;\n"
      "2 bad usage.");
  command->callback([watch, &context] { context.exit_code = RunWatch(*watch, context); });
}

}  // namespace

void AddKeyCommands(CLI::App& app, CliContext& context) {
  AddGet(app, context);
  AddSet(app, context);
  AddKeys(app, context);
  AddWatch(app, context);
}

}  // namespace resilient::store
