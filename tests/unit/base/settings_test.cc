// Goal: every documented variable is accepted, every wrong value is refused with a text that helps.
// Method: tables of environments.
#include <resilient/settings.h>

#include <algorithm>
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

namespace resilient {
namespace {

using Environment = std::vector<std::pair<std::string, std::string>>;
using std::chrono::hours;
using std::chrono::minutes;
using std::chrono::seconds;

TEST(ParseDuration, Accepted_Table) {
  const std::pair<const char*, Duration> kTable[] = {
      {"5", seconds(5)},
      {"5s", seconds(5)},
      {"500ms", Millis(500)},
      {"10min", minutes(10)},
      {"1h", hours(1)},
      {"0", Duration::zero()},
      {"0ms", Duration::zero()},
      {"007s", seconds(7)},
      {"9223372036", seconds(9223372036)},
      {"9223372036854ms", Millis(9223372036854)},
  };
  for (const auto& [text, expected] : kTable) EXPECT_EQ(ParseDuration(text), expected) << text;
}

TEST(ParseDuration, Refused_Table) {
  for (const char* text : {"",
                           "s",
                           "ms",
                           "min",
                           "h",
                           "-1",
                           "-1s",
                           "+1",
                           " 1",
                           "1 ",
                           "1 s",
                           "1.5s",
                           "1e3",
                           "1m",
                           "1d",
                           "1S",
                           "1sec",
                           "1ss",
                           "0x10",
                           "9223372037",
                           "9223372036855ms",
                           "99999999999999999999",
                           "inf",
                           "1h30min"}) {
    EXPECT_EQ(ParseDuration(text), std::nullopt) << text;
  }
}

TEST(ParseBytes, Table) {
  const std::pair<const char*, std::optional<std::size_t>> kTable[] = {
      {"0", 0},
      {"65536", 65536},
      {"64KiB", 65536},
      {"256MiB", 268435456},
      {"3GiB", 3221225472},
      {"17179869183GiB", 18446744072635809792u},
      {"17179869184GiB", std::nullopt},
      {"18446744073709551616", std::nullopt},
      {"", std::nullopt},
      {"MiB", std::nullopt},
      {"-1", std::nullopt},
      {"1 MiB", std::nullopt},
      {"1MB", std::nullopt},
      {"1M", std::nullopt},
      {"1.5MiB", std::nullopt},
      {"1KiBMiB", std::nullopt},
  };
  for (const auto& [text, expected] : kTable) EXPECT_EQ(ParseBytes(text), expected) << text;
}

TEST(ParseSettings, Nothing_GivesTheDefaults) {
  const Result<Settings> settings = ParseSettings({{"PATH", "/bin"}, {"RESILIENT", "x"}});
  ASSERT_TRUE(settings.ok());
  EXPECT_EQ(settings->store, "");
  EXPECT_EQ(settings->linger, seconds(60));
  EXPECT_EQ(settings->lease_ttl, seconds(5));
  EXPECT_EQ(settings->budget, seconds(20));
  EXPECT_EQ(settings->seat_wait, Duration::zero());
  EXPECT_FALSE(settings->strict_timeouts);
  EXPECT_EQ(settings->op_deadline, seconds(120));
  EXPECT_EQ(settings->shm_limit, 256u << 20);
  EXPECT_FALSE(settings->hierarchical_order);
  EXPECT_EQ(settings->socket_ifname, "");
  EXPECT_EQ(settings->socket_streams, 1);
  EXPECT_FALSE(settings->encrypted_links);
  EXPECT_EQ(settings->nccl_library, "");
  EXPECT_EQ(settings->cuda_runtime, "");
  EXPECT_EQ(settings->log, "warn");
  EXPECT_TRUE(settings->host_watch);
  EXPECT_TRUE(settings->warnings.empty());
}

TEST(ParseSettings, EveryField_IsRead) {
  const Result<Settings> settings = ParseSettings({{"RESILIENT_STORE", "a:1,[::1]:2"},
                                                   {"RESILIENT_JOB", "j"},
                                                   {"RESILIENT_BIND", "10.0.0.1"},
                                                   {"RESILIENT_LINGER", "1min"},
                                                   {"RESILIENT_LEASE_TTL", "2500ms"},
                                                   {"RESILIENT_BUDGET", "30"},
                                                   {"RESILIENT_SEAT_WAIT", "10min"},
                                                   {"RESILIENT_TIMEOUT_POLICY", "strict"},
                                                   {"RESILIENT_OP_DEADLINE", "90s"},
                                                   {"RESILIENT_SHM_LIMIT", "64MiB"},
                                                   {"RESILIENT_CHECKSUM", "1"},
                                                   {"RESILIENT_TAKE_OVER", "nccl,gloo"},
                                                   {"RESILIENT_REDUCTION_ORDER", "hierarchical"},
                                                   {"RESILIENT_SOCKET_IFNAME", "eth0,lo"},
                                                   {"RESILIENT_SOCKET_STREAMS", "8"},
                                                   {"RESILIENT_LINK_TLS", "1"},
                                                   {"RESILIENT_NCCL_LIBRARY", "/x/libnccl.so.2"},
                                                   {"RESILIENT_CUDA_RUNTIME", "/x/libcudart.so.13"},
                                                   {"RESILIENT_LOG", "json:debug"},
                                                   {"RESILIENT_OWNER", "12:345"},
                                                   {"RESILIENT_SUPERVISED", "1"},
                                                   {"RESILIENT_ATTEMPT", "7"},
                                                   {"RESILIENT_LAUNCH", "4711.123.1"},
                                                   {"RESILIENT_SEATED", "/tmp/seat"},
                                                   {"RESILIENT_HEAL", "auto"},
                                                   {"RESILIENT_REPLAY", "1"},
                                                   {"RESILIENT_SPARES", "2"},
                                                   {"RESILIENT_REPLACES", "1"},
                                                   {"RESILIENT_MIN_WORLD", "2"},
                                                   {"RESILIENT_HOST_WATCH", "0"}});
  ASSERT_TRUE(settings.ok()) << settings.status().message();
  EXPECT_TRUE(settings->auto_heal);
  EXPECT_TRUE(settings->replay);
  EXPECT_EQ(settings->spares, 2);
  EXPECT_EQ(settings->store, "a:1,[::1]:2");
  EXPECT_EQ(settings->job, "j");
  EXPECT_EQ(settings->bind, "10.0.0.1");
  EXPECT_EQ(settings->linger, minutes(1));
  EXPECT_EQ(settings->lease_ttl, Millis(2500));
  EXPECT_EQ(settings->budget, seconds(30));
  EXPECT_EQ(settings->seat_wait, minutes(10));
  EXPECT_TRUE(settings->strict_timeouts);
  EXPECT_EQ(settings->op_deadline, seconds(90));
  EXPECT_EQ(settings->shm_limit, 64u << 20);
  EXPECT_TRUE(settings->checksums);
  EXPECT_TRUE(settings->hierarchical_order);
  EXPECT_EQ(settings->socket_ifname, "eth0,lo");
  EXPECT_EQ(settings->socket_streams, 8);
  EXPECT_TRUE(settings->encrypted_links);
  EXPECT_EQ(settings->nccl_library, "/x/libnccl.so.2");
  EXPECT_EQ(settings->cuda_runtime, "/x/libcudart.so.13");
  EXPECT_EQ(settings->log, "json:debug");
  EXPECT_EQ(settings->owner, "12:345");
  EXPECT_TRUE(settings->supervised);
  EXPECT_TRUE(settings->replaces);
  EXPECT_EQ(settings->attempt, 7u);
  EXPECT_FALSE(settings->host_watch);
  EXPECT_TRUE(settings->warnings.empty());
}

// The normative list; a valid value for each.
const Environment kWithEffect = {{"RESILIENT_STORE", "host:1"},
                                 {"RESILIENT_JOB", "j"},
                                 {"RESILIENT_BIND", "127.0.0.1"},
                                 {"RESILIENT_LINGER", "0"},
                                 {"RESILIENT_LEASE_TTL", "1"},
                                 {"RESILIENT_BUDGET", "20s"},
                                 {"RESILIENT_SEAT_WAIT", "0"},
                                 {"RESILIENT_LOG", "off"},
                                 {"RESILIENT_OWNER", "1:0"},
                                 {"RESILIENT_SUPERVISED", "0"},
                                 {"RESILIENT_ATTEMPT", "0"},
                                 {"RESILIENT_LAUNCH", "1.1.1"},
                                 {"RESILIENT_SEATED", "/tmp/seat"},
                                 {"RESILIENT_HOST_WATCH", "1"},
                                 {"RESILIENT_TIMEOUT_POLICY", "strict"},
                                 {"RESILIENT_OP_DEADLINE", "120s"},
                                 {"RESILIENT_STALL", "1h"},
                                 {"RESILIENT_DEVICE_STALL", "10min"},
                                 {"RESILIENT_WAIT_LOG", "30s"},
                                 {"RESILIENT_SOCKET_IFNAME", "eth0"},
                                 {"RESILIENT_SOCKET_STREAMS", "1"},
                                 {"RESILIENT_SHM_LIMIT", "256MiB"},
                                 {"RESILIENT_CHECKSUM", "1"},
                                 {"RESILIENT_TAKE_OVER", "nccl,gloo"},
                                 {"RESILIENT_REDUCTION_ORDER", "rank"},
                                 {"RESILIENT_HEAL", "auto"},
                                 {"RESILIENT_ALLOW_SHARED_GPU", "1"},
                                 {"RESILIENT_FAKE_DEVICES", "h|GPU-1|0|1"},
                                 {"RESILIENT_REPLAY", "1"}};

TEST(ParseSettings, NamesWithEffect_AreAccepted) {
  const Result<Settings> settings = ParseSettings(kWithEffect);
  ASSERT_TRUE(settings.ok()) << settings.status().message();
  EXPECT_TRUE(settings->warnings.empty()) << settings->warnings.front();
}

TEST(ParseSettings, AskingForWhatIsDoneAnyway_IsNoWarning) {
  const Result<Settings> settings = ParseSettings({{"RESILIENT_HEAL", "explicit"},
                                                   {"RESILIENT_REPLAY", "0"},
                                                   {"RESILIENT_ALLOW_SHARED_GPU", "0"}});
  ASSERT_TRUE(settings.ok()) << settings.status().message();
  EXPECT_TRUE(settings->warnings.empty()) << settings->warnings.front();
}

TEST(ParseSettings, SharedGpu_IsRefusedThroughTheHostOrThroughNccl) {
  EXPECT_EQ(ParseSettings({})->shared_gpu, SharedGpu::kRefused);
  const auto of = [](const char* value) {
    return ParseSettings({{"RESILIENT_ALLOW_SHARED_GPU", value}});
  };
  EXPECT_EQ(of("0")->shared_gpu, SharedGpu::kRefused);
  EXPECT_EQ(of("1")->shared_gpu, SharedGpu::kThroughHost);
  EXPECT_EQ(of("nccl")->shared_gpu, SharedGpu::kThroughNccl);
  EXPECT_EQ(of("yes").status().message(),
            "RESILIENT_ALLOW_SHARED_GPU=\"yes\" is not valid: accepted is \"0\", \"1\" or "
            "\"nccl\". Correct it in the environment that starts the job");
}

TEST(ParseSettings, FakeDevices_AreOneARank) {
  const auto settings =
      ParseSettings({{"RESILIENT_FAKE_DEVICES", "a|GPU-1|0|2;|MIG-2|1|2;b||-1|4"}});
  ASSERT_TRUE(settings.ok()) << settings.status().message();
  ASSERT_EQ(settings->fake_devices.size(), 3U);
  DeviceClaim first;
  first.host = "a";
  first.uuid = "GPU-1";
  first.ordinal = 0;
  first.visible = 2;
  EXPECT_EQ(settings->fake_devices[0], first);
  EXPECT_EQ(settings->fake_devices[1].host, "");
  EXPECT_EQ(settings->fake_devices[1].uuid, "MIG-2");
  EXPECT_EQ(settings->fake_devices[2].uuid, "");
  EXPECT_EQ(settings->fake_devices[2].ordinal, -1);
  EXPECT_EQ(settings->fake_devices[2].visible, 4);
  for (const char* wrong : {"a", "a|GPU-1|0", "a|GPU-1|0|2|", "a|GPU-1|x|2", "a|GPU-1|0|2;"}) {
    const auto refused = ParseSettings({{"RESILIENT_FAKE_DEVICES", wrong}});
    ASSERT_FALSE(refused.ok()) << wrong;
    EXPECT_EQ(refused.status().code(), StatusCode::kSetting);
  }
}

TEST(ParseSettings, Tls_IsThreeFiles) {
  const auto settings = ParseSettings({{"RESILIENT_TLS_CERT", "/some/certificate"},
                                       {"RESILIENT_TLS_KEY", "/some/key"},
                                       {"RESILIENT_TLS_CA", "/some/ca"}});
  ASSERT_TRUE(settings.ok()) << settings.status().message();
  EXPECT_EQ(settings->tls, (TlsFiles{"/some/certificate", "/some/key", "/some/ca"}));
  EXPECT_TRUE(settings->warnings.empty()) << settings->warnings.front();
  EXPECT_TRUE(ParseSettings({})->tls.empty());
}

TEST(ParseSettings, WildcardBind_IsForAStoreThatAsksForCertificates) {
  const std::pair<std::string, std::string> bind("RESILIENT_BIND", "0.0.0.0");
  const std::pair<std::string, std::string> certificate("RESILIENT_TLS_CERT", "/some/certificate");
  const std::pair<std::string, std::string> authority("RESILIENT_TLS_CA", "/some/ca");
  EXPECT_TRUE(ParseSettings({bind, certificate, authority}).ok());
  EXPECT_EQ(ParseSettings({bind, certificate}).status().code(), StatusCode::kSetting);
  EXPECT_EQ(ParseSettings({bind, authority}).status().code(), StatusCode::kSetting);
}

TEST(ParseSettings, BlanksAroundValues_CountForNothing) {
  const auto settings = ParseSettings({{"RESILIENT_LEASE_TTL", " 7s\n"},
                                       {"RESILIENT_SPARES", "\t2 "},
                                       {"RESILIENT_SHM_LIMIT", "64KiB\r\n"},
                                       {"RESILIENT_REPLAY", " 1"},
                                       {"RESILIENT_BUDGET", " \n"},
                                       {"RESILIENT_TOKEN_FILE", "/a folder/token "}});
  ASSERT_TRUE(settings.ok()) << settings.status().message();
  EXPECT_EQ(settings->lease_ttl, seconds(7));
  EXPECT_EQ(settings->spares, 2);
  EXPECT_EQ(settings->shm_limit, std::size_t{64} << 10);
  EXPECT_TRUE(settings->replay);
  EXPECT_EQ(settings->budget, seconds(20));
  EXPECT_EQ(settings->token_file, "/a folder/token ");
  EXPECT_FALSE(ParseSettings({{"RESILIENT_SPARES", "1 2"}}).ok());
}

TEST(ParseSettings, EmptyValue_IsUnset) {
  Environment environment = kWithEffect;
  environment.emplace_back("RESILIENT_TOKEN_FILE", "");
  for (auto& variable : environment) variable.second.clear();
  const Result<Settings> settings = ParseSettings(environment);
  ASSERT_TRUE(settings.ok()) << settings.status().message();
  EXPECT_EQ(settings->lease_ttl, seconds(5));
  EXPECT_EQ(settings->log, "warn");
  EXPECT_TRUE(settings->warnings.empty());
}

TEST(ParseSettings, BadValue_NamesVariableValueAndForms) {
  struct Case {
    const char* name;
    const char* value;
    const char* accepted;
  };
  const Case kCases[] = {
      {"RESILIENT_LEASE_TTL", "5 s", "\"500ms\", \"10min\", \"1h\""},
      {"RESILIENT_LEASE_TTL", "999ms", "at least 1 s"},
      {"RESILIENT_LEASE_TTL", "0", "at least 1 s"},
      {"RESILIENT_LINGER", "-1", "a duration"},
      {"RESILIENT_BUDGET", "0", "at least 1 s"},
      {"RESILIENT_SEAT_WAIT", "soon", "a duration"},
      {"RESILIENT_STALL", "1d", "a duration"},
      {"RESILIENT_DEVICE_STALL", "500ms", "at least 1 s"},
      {"RESILIENT_HEAL", "yes", "\"explicit\" or \"auto\""},
      {"RESILIENT_TIMEOUT_POLICY", "lax", "\"liveness\" or \"strict\""},
      {"RESILIENT_REDUCTION_ORDER", "ring", "\"rank\" or \"hierarchical\""},
      {"RESILIENT_OP_DEADLINE", "0", "at least 1 s"},
      {"RESILIENT_SOCKET_STREAMS", "0", "1 to 8"},
      {"RESILIENT_TAKE_OVER", "nccl, gloo", "\"nccl,gloo\""},
      {"RESILIENT_TAKE_OVER", "mpi", "\"nccl\", \"gloo\""},
      {"RESILIENT_SOCKET_STREAMS", "9", "1 to 8"},
      {"RESILIENT_SHM_LIMIT", "256MB", "\"256MiB\""},
      {"RESILIENT_SHM_LIMIT", "-1", "a number of bytes"},
      {"RESILIENT_CHECKSUM", "on", "\"0\" or \"1\""},
      {"RESILIENT_REPLAY", "true", "\"0\" or \"1\""},
      {"RESILIENT_LOG", "loud", "debug, info, warn, error or off"},
      {"RESILIENT_LOG", "json:", "debug, info, warn, error or off"},
      {"RESILIENT_STORE", "host", "\"host:port\""},
      {"RESILIENT_STORE", "host:", "\"host:port\""},
      {"RESILIENT_STORE", "host:0", "\"host:port\""},
      {"RESILIENT_STORE", "host:65536", "\"host:port\""},
      {"RESILIENT_STORE", ":1", "\"host:port\""},
      {"RESILIENT_STORE", "a:1,", "\"host:port\""},
      {"RESILIENT_STORE", "a:1,,b:2", "\"host:port\""},
      {"RESILIENT_STORE", "::1:5", "in brackets"},
      {"RESILIENT_STORE", "tcp://a:1", "\"host:port\""},
      {"RESILIENT_OWNER", "12", "\"pid:start\""},
      {"RESILIENT_OWNER", "0:1", "\"pid:start\""},
  };
  for (const Case& bad : kCases) {
    const Status status = ParseSettings({{bad.name, bad.value}}).status();
    EXPECT_EQ(status.code(), StatusCode::kSetting) << bad.name << "=" << bad.value;
    EXPECT_NE(status.message().find(std::string(bad.name) + "=\"" + bad.value + "\""),
              std::string::npos)
        << status.message();
    EXPECT_NE(status.message().find(bad.accepted), std::string::npos) << status.message();
  }
}

TEST(ParseSettings, UnknownName_IsAWarningWithTheNearest) {
  const std::pair<const char*, const char*> kTable[] = {
      {"RESILIENT_LEASE_TLL", "RESILIENT_LEASE_TTL"}, {"RESILIENT_STORES", "RESILIENT_STORE"},
      {"RESILIENT_LOG_LEVEL", "RESILIENT_LOG"},       {"RESILIENT_TLS_CERTS", "RESILIENT_TLS_CERT"},
      {"RESILIENT_SEATWAIT", "RESILIENT_SEAT_WAIT"},
  };
  for (const auto& [name, nearest] : kTable) {
    const Result<Settings> settings = ParseSettings({{name, "1"}});
    ASSERT_TRUE(settings.ok());
    ASSERT_EQ(settings->warnings.size(), 1U) << name;
    EXPECT_NE(settings->warnings[0].find(std::string("variable ") + name + " is unknown"),
              std::string::npos)
        << settings->warnings[0];
    EXPECT_NE(settings->warnings[0].find(std::string("did you mean ") + nearest + "?"),
              std::string::npos)
        << settings->warnings[0];
  }
}

TEST(ParseSettings, HugeUnknownName_IsHandled) {
  const Result<Settings> settings = ParseSettings({{"RESILIENT_" + std::string(100000, 'X'), ""}});
  ASSERT_TRUE(settings.ok());
  EXPECT_EQ(settings->warnings.size(), 1U);
}

TEST(ParseSettings, WildcardBind_IsRefused) {
  for (const char* bind : {"0.0.0.0", "::", "[::]:5", "*"}) {
    const Status status = ParseSettings({{"RESILIENT_BIND", bind}}).status();
    EXPECT_EQ(status.code(), StatusCode::kSetting) << bind;
    EXPECT_NE(status.message().find("every network"), std::string::npos) << status.message();
  }
}

TEST(ParseSettings, WildcardBind_WithATokenFile_IsAccepted) {
  const Result<Settings> settings =
      ParseSettings({{"RESILIENT_BIND", "0.0.0.0"}, {"RESILIENT_TOKEN_FILE", "/secret/token"}});
  ASSERT_TRUE(settings.ok()) << settings.status().message();
  EXPECT_EQ(settings->bind, "0.0.0.0");
  EXPECT_EQ(settings->token_file, "/secret/token");
}

TEST(ProcessEnvironment, HasWhatWasSet) {
  ASSERT_EQ(setenv("RESILIENT_JOB", "a=b", 1), 0);
  const Environment environment = ProcessEnvironment();
  unsetenv("RESILIENT_JOB");
  const auto found = std::find(environment.begin(), environment.end(),
                               std::pair<std::string, std::string>("RESILIENT_JOB", "a=b"));
  EXPECT_NE(found, environment.end());
}

}  // namespace
}  // namespace resilient
