// What Server tells people and their tools: metrics, and whether it lives and is ready.

#include <utility>

#include "runtime/base/log.h"
#include "store/server/server.h"

namespace resilient::store {
namespace {

constexpr Duration kTickAgeMax = std::chrono::seconds(5);  // An older tick: the loop was stuck.
constexpr char kText[] = "text/plain; charset=utf-8";
constexpr unsigned kOk = 200;
constexpr unsigned kNotFound = 404;
constexpr unsigned kUnavailable = 503;

}  // namespace

Status Server::StartHttp() {
  if (!options_.metrics) return {};
  Result<std::unique_ptr<HttpEndpoint>> endpoint = HttpEndpoint::Start(
      loop_, *options_.metrics, [this](std::string_view path) { return AnswerHttp(path); });
  if (!endpoint.ok()) return endpoint.status();
  http_ = std::move(*endpoint);
  const std::string address = FormatHostPort(http_->address());
  RESILIENT_LOG_RECORD(kInfo, "listen", {{"metrics", address}},
                       StrCat("serves metrics on http://", address, "/metrics"));
  return {};
}

void Server::OnRestoring(std::size_t rows) {
  if (http_ != nullptr) http_->Poll();
  if (options_.notifier != nullptr) {
    options_.notifier->Starting(clock_.Now(), StrCat("restores: ", rows, " rows read"));
  }
}

HttpAnswer Server::AnswerHttp(std::string_view path) {
  if (path == "/metrics") return {kOk, kMetricsContentType, MetricsText()};
  if (path == "/healthz") return AnswerHealth();
  if (path == "/readyz") return AnswerReady();
  return {kNotFound, kText, "here are /metrics, /healthz and /readyz\n"};
}

// Whoever gets an answer knows that the loop turns. What is left to say is whether it turned well.
HttpAnswer Server::AnswerHealth() const {
  const Duration age = clock_.Now() - last_tick_;
  if (last_tick_ == Instant() || age < kTickAgeMax) return {kOk, kText, "ok\n"};
  return {kUnavailable, kText, StrCat("the last tick was ", ToSeconds(age), " s ago\n")};
}

HttpAnswer Server::AnswerReady() const {
  const std::string why = WhyNotReady();
  if (why.empty()) return {kOk, kText, "ready\n"};
  return {kUnavailable, kText, why + "\n"};
}

std::string Server::WhyNotReady() const {
  if (shutting_down_) return "the server ends";
  if (last_tick_ == Instant()) return "the server starts";
  if (!listeners_.listening()) return "the server does not listen any more";
  return {};
}

std::string Server::MetricsText() {
  const CoreCounters none;
  MetricsPage page{metrics_, core_ != nullptr ? core_->counters() : none};
  // While rows are restored the core is not whole.
  if (last_tick_ != Instant()) page.gauges = core_->Gauges();
  page.version = options_.version;
  page.durable = engine_ != nullptr || persister_ != nullptr;
  page.ready = WhyNotReady().empty();
  page.encrypted = encryption_.on();
  page.held_bytes = held_.bytes();
  RenewOutput();
  page.output_bytes = output_.total();
  page.input_bytes = input_.total();
  page.before_hello = newcomers_.size();
  page.watched_processes = processes_.size();
  page.start_unix_s = started_unix_s_;
  ServerLimits limits = options_.limits;
  limits.connections = connections_max_;
  page.limits = ListLimits(limits);
  return RenderMetrics(page);
}

}  // namespace resilient::store
