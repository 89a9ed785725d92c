// A job as Python holds it.
//
// 1. Waiting releases the GIL and wakes up to look for signals.
// 2. The engine outlives every handle of its jobs.
#pragma once

#include <algorithm>
#include <chrono>
#include <cmath>
#include <memory>
#include <stdexcept>
#include <vector>

#include "bindings.hpp"
#include "engine.hpp"

namespace megatron_uring {

struct JobHandle {
    std::shared_ptr<Engine> engine;  // outlives the handle, so that cancelling is always safe
    std::shared_ptr<Job> job;

    bool done() const {
        if (job->done()) return true;
        if (engine->in_child()) engine->wait(*job, 0.0);  // throws
        return false;
    }

    bool staged() const { return job->staged() || done(); }

    bool wait(double timeout_s) const {
        const bool ended =
            in_slices(timeout_s, [this](double slice_s) { return engine->wait(*job, slice_s); });
        if (ended) job->rethrow();
        return ended;
    }

    bool wait_staged(double timeout_s) const {
        return in_slices(timeout_s,
                         [this](double slice_s) { return engine->wait_staged(*job, slice_s); });
    }

    // Waits in slices, between which signals are looked for.
    template <class Wait>
    static bool in_slices(double timeout_s, Wait&& wait_for) {
        if (std::isnan(timeout_s) || timeout_s < 0) {
            throw std::invalid_argument("timeout_s is negative or not a number");
        }
        constexpr double slice_limit_s = 0.1;
        const auto begin = std::chrono::steady_clock::now();
        for (;;) {
            const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - begin;
            const double left_s = std::max(timeout_s - spent.count(), 0.0);
            {
                const py::gil_scoped_release release;
                if (wait_for(std::min(left_s, slice_limit_s))) return true;
            }
            if (left_s <= slice_limit_s) return false;
            if (PyErr_CheckSignals() != 0) throw py::error_already_set();
        }
    }

    py::array_t<std::uint32_t> checksums() const {
        require_done();
        return array_to(job->checksums());
    }

    py::array bad_blocks() const {
        require_done();
        if (job->operation() != Operation::read) throw std::invalid_argument("not a read job");
        std::vector<std::int64_t> cells;
        for (const BadBlock& block : job->bad_blocks()) {
            cells.insert(cells.end(),
                         {block.range_number, block.file_offset, block.expected, block.found});
        }
        return array_to(cells).reshape({-1, 4});
    }

    void require_done() const {
        if (!done()) throw std::invalid_argument("job is not done");
        job->rethrow();
    }
};

}  // namespace megatron_uring
