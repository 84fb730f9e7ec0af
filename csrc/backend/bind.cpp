// Python names of the throttled backend. Everything else is free of pybind, which is slow to compile.
#include <pybind11/chrono.h>
#include <torch/csrc/utils/pybind.h>

#include "backend/manual_backend.h"
#include "backend/throttled_backend.h"

namespace py = pybind11;
using lightning_smp::Completion;
using lightning_smp::ManualBackend;
using lightning_smp::ThrottledBackend;
// Backends call out to threads that may need Python's interpreter lock.
using Unlocked = py::call_guard<py::gil_scoped_release>;

namespace {

Completion completion_of(bool polls) { return polls ? Completion::kPoll : Completion::kWait; }

py::dict counters_of(const ThrottledBackend& backend) {
  lightning_smp::Counters counters;
  {
    const py::gil_scoped_release unlocked;
    counters = backend.gate().counters();
  }
  return py::dict(
      py::arg("issued") = counters.issued,
      py::arg("waited") = counters.waited,
      py::arg("waited_s") = counters.waited_s,
      py::arg("in_flight") = counters.in_flight,
      py::arg("max_in_flight") = counters.max_in_flight);
}

void bind_throttled(py::module& m) {
  py::class_<ThrottledBackend, c10::intrusive_ptr<ThrottledBackend>, c10d::Backend>(
      m, "ThrottledBackend")
      .def(
          py::init([](lightning_smp::BackendPtr inner,
                      int64_t limit,
                      bool polls,
                      std::chrono::milliseconds timeout) {
            return c10::make_intrusive<ThrottledBackend>(
                std::move(inner), limit, completion_of(polls), timeout);
          }),
          py::arg("inner"),
          py::kw_only(),
          py::arg("limit"),
          py::arg("polls"),
          py::arg("timeout"))
      .def_property_readonly("inner", &ThrottledBackend::inner)
      .def_property_readonly(
          "limit", [](const ThrottledBackend& backend) { return backend.gate().limit(); })
      .def("counters", &counters_of)
      // What only the inner backend's class has (split counts, sequence numbers, NCCL's own).
      .def("__getattr__", [](const ThrottledBackend& backend, const std::string& name) {
        return py::cast(backend.inner()).attr(name.c_str());
      });
}

void bind_manual(py::module& m) {
  py::class_<ManualBackend, c10::intrusive_ptr<ManualBackend>, c10d::Backend>(m, "ManualBackend")
      .def(
          py::init([](int rank, int size, bool polls) {
            return c10::make_intrusive<ManualBackend>(rank, size, completion_of(polls));
          }),
          py::arg("rank") = 0,
          py::arg("size") = 1,
          py::kw_only(),
          py::arg("polls"))
      .def(
          "complete",
          &ManualBackend::complete,
          py::arg("count") = 1,
          py::arg("error") = "",
          Unlocked())
      .def_property_readonly("issued", &ManualBackend::issued)
      .def_property_readonly("in_flight", &ManualBackend::in_flight)
      .def_property_readonly("max_in_flight", &ManualBackend::max_in_flight)
      .def_property_readonly("waits", &ManualBackend::waits)
      .def_property_readonly("is_aborted", &ManualBackend::is_aborted);
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.doc() = "The throttled c10d backend of lightning_smp.";
  py::module::import("torch._C._distributed_c10d");  // the base class's Python type
  bind_throttled(m);
  bind_manual(m);
}
