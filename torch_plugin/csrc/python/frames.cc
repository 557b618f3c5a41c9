#include "torch_plugin/csrc/python/frames.h"

#include <cstring>
#include <string_view>
#include <utility>
#include <vector>

#include <pybind11/pybind11.h>

namespace resilient::plugin {
namespace {

namespace py = pybind11;

constexpr int kCallSiteFramesMax = 64;
constexpr int kStackFramesMax = 256;
constexpr std::size_t kStackBytesMax = 8192;
constexpr std::size_t kNameBytesMax = 64;

std::string DirectoryOf(const char* module_name) {
  const auto path = py::module_::import(module_name).attr("__file__").cast<std::string>();
  return path.substr(0, path.rfind('/') + 1);
}

// Empty for what is not UTF-8.
std::string_view Text(PyObject* string) {
  Py_ssize_t length = 0;
  const char* text = PyUnicode_AsUTF8AndSize(string, &length);
  if (text == nullptr) {
    PyErr_Clear();
    return {};
  }
  return {text, static_cast<std::size_t>(length)};
}

std::string_view FileOf(PyCodeObject* code) { return Text(code->co_filename); }

std::string LineOf(PyFrameObject* frame, PyCodeObject* code) {
  const std::string_view path = FileOf(code);
  const std::string_view name = Text(code->co_name);
  std::string line(path.substr(path.rfind('/') + 1));  // All of it where there is no slash.
  line.append(":").append(std::to_string(PyFrame_GetLineNumber(frame)));
  if (!name.empty()) line.append(" ").append(name);
  return line;
}

std::string StackLineOf(PyFrameObject* frame, PyCodeObject* code) {
  std::string line = "File \"";
  line.append(FileOf(code)).append("\", line ");
  line.append(std::to_string(PyFrame_GetLineNumber(frame))).append(", in ");
  return line.append(Text(code->co_name)).append("\n");
}

// Visits the frames outwards, `most` of them, until `visit` returns false. True: there are more.
template <typename Visit>
bool WalkOutwards(PyFrameObject* innermost, int most, const Visit& visit) {
  PyFrameObject* frame = innermost;
  Py_XINCREF(frame);
  bool goes_on = true;
  for (int depth = 0; frame != nullptr && goes_on && depth < most; ++depth) {
    PyCodeObject* code = PyFrame_GetCode(frame);
    goes_on = visit(frame, code);
    Py_DECREF(code);
    PyFrameObject* next = PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = next;
  }
  const bool more = frame != nullptr;
  Py_XDECREF(frame);
  return more;
}

// Newest call last; of a long stack its newest part.
std::string Joined(const std::vector<std::string>& newest_first, bool more) {
  const std::string_view left_out = "(older calls are left out)\n";
  std::size_t used = newest_first.size();
  std::size_t bytes = left_out.size();
  for (std::size_t i = 0; i < newest_first.size(); ++i) {
    bytes += newest_first[i].size();
    if (bytes > kStackBytesMax) {
      used = i;
      break;
    }
  }
  std::string stack;
  stack.reserve(bytes);
  if (more || used < newest_first.size()) stack = left_out;
  while (used > 0) stack.append(newest_first[--used]);
  if (!stack.empty()) stack.pop_back();  // The last newline.
  return stack;
}

}  // namespace

bool InterpreterIsEnding() {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsInitialized() == 0 || Py_IsFinalizing() != 0;
#else
  return Py_IsInitialized() == 0 || _Py_IsFinalizing() != 0;
#endif
}

FrameNames::FrameNames()
    : torch_dir_(DirectoryOf("torch")),
      package_dir_(DirectoryOf("torch_resilient")),
      standard_dir_(DirectoryOf("threading")),
      active_(py::module_::import("threading").attr("_active").cast<py::dict>().release().ptr()) {}

bool FrameNames::IsUsers(PyCodeObject* code) const {
  std::string_view path = FileOf(code);
  // What is typed in, or given on the command line; others in brackets are made by libraries.
  if (path == "<stdin>" || path == "<string>") return true;
  if (path.empty() || path.front() == '<') return false;
  if (path.starts_with(torch_dir_) || path.starts_with(package_dir_)) return false;
  if (!path.starts_with(standard_dir_)) return true;
  path.remove_prefix(standard_dir_.size());
  return path.starts_with("site-packages/") || path.starts_with("dist-packages/");
}

std::string FrameNames::UsersLine(PyFrameObject* innermost) const {
  std::string line;
  WalkOutwards(innermost, kCallSiteFramesMax, [&](PyFrameObject* frame, PyCodeObject* code) {
    if (IsUsers(code)) line = LineOf(frame, code);
    return line.empty();
  });
  return line;
}

// `entry`: the file of the thread's outermost frame, but for threading.py.
bool FrameNames::IsHousekeeping(std::string_view entry, std::string_view innermost) const {
  if (entry == package_dir_ + "_events.py") return innermost == entry;  // Else it runs a callback.
  return entry == torch_dir_ + "utils/data/_utils/pin_memory.py" ||
         entry.starts_with(torch_dir_ + "_inductor/compile_worker/") ||
         entry == standard_dir_ + "multiprocessing/queues.py" ||
         entry.ends_with("/tqdm/_monitor.py") ||
         entry.ends_with("/tensorboard/summary/writer/event_file_writer.py") ||
         entry.find("/wandb/sdk/") != std::string_view::npos;
}

ProgramThread FrameNames::DescribeThread(int id, PyFrameObject* innermost) const {
  ProgramThread thread{.id = id, .at = UsersLine(innermost), .housekeeping = false};
  const std::string threading = standard_dir_ + "threading.py";
  std::string entry;
  std::string first;
  const bool more =
      WalkOutwards(innermost, kStackFramesMax, [&](PyFrameObject* frame, PyCodeObject* code) {
        const std::string_view file = FileOf(code);
        if (first.empty()) {
          first = file;
          if (thread.at.empty()) thread.at = LineOf(frame, code);
        }
        if (file != threading) entry = file;
        return true;
      });
  thread.housekeeping = !more && IsHousekeeping(entry, first);
  return thread;
}

// Borrowed; null where there is none. By the dictionary of the object: a class of the program's may
// compute its attributes.
PyObject* FrameNames::AttributeOf(unsigned long thread, const char* name) const {
  PyObject* value = nullptr;
  PyObject* key = PyLong_FromUnsignedLong(thread);
  PyObject* object = key == nullptr ? nullptr : PyDict_GetItemWithError(active_, key);
  PyObject* fields = object == nullptr ? nullptr : PyObject_GenericGetDict(object, nullptr);
  if (fields != nullptr) value = PyDict_GetItemString(fields, name);
  Py_XDECREF(fields);
  Py_XDECREF(key);
  PyErr_Clear();
  return value;
}

std::string FrameNames::NameOf(unsigned long thread) const {
  PyObject* value = AttributeOf(thread, "_name");
  if (value == nullptr || !PyUnicode_Check(value)) return {};
  std::string name(Text(value));
  if (name.size() > kNameBytesMax) {
    std::size_t size = kNameBytesMax;  // Not in the midst of a character of UTF-8.
    while (size > 0 && (static_cast<unsigned char>(name[size]) & 0xC0U) == 0x80U) --size;
    name.resize(size);
  }
  for (char& character : name) {
    if (static_cast<unsigned char>(character) < ' ') character = ' ';
  }
  return name;
}

int FrameNames::IdOf(unsigned long thread) const {
  PyObject* value = AttributeOf(thread, "_native_id");
  if (value == nullptr || !PyLong_Check(value)) return 0;
  const long id = PyLong_AsLong(value);
  PyErr_Clear();
  return id > 0 ? static_cast<int>(id) : 0;
}

ThreadStack FrameNames::Describe(PyFrameObject* innermost) const {
  ThreadStack seen;
  seen.top = UsersLine(innermost);
  std::vector<std::string> lines;
  const bool more =
      WalkOutwards(innermost, kStackFramesMax, [&](PyFrameObject* frame, PyCodeObject* code) {
        if (seen.top.empty()) seen.top = LineOf(frame, code);
        lines.push_back(StackLineOf(frame, code));
        return true;
      });
  seen.stack = Joined(lines, more);
  return seen;
}

}  // namespace resilient::plugin
