"""Faults in playground/, each with the tests that are to notice it: what the tests prove, and what may be deleted from them.

    python tests/seeded_faults.py                  seed each in a copy of the checkout; say which of its tests fail
    python tests/seeded_faults.py tolerance race   those whose file or name holds one of these words
    python tests/seeded_faults.py --list           which there are, and whether their texts and tests are still there

A test may go when every fault that it notices is noticed by another one. Exit status 1 if a fault goes unnoticed, or its text
or a test is gone; a test that also fails without the fault notices nothing.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# The file, below playground/ or in cuda_emulator/, and what is wrong with it; the tests, below tests/, each of which is to
# fail; the text, which stands once in the file, and what becomes of it.
TABLE = r"""
judge/tolerance.py: a hundred times as much is allowed
    judge/test_tolerance.py
-SLACK = 2.0
+SLACK = 200.0

judge/tolerance.py: errors in units of the size
    judge/test_tolerance.py
-self.spread = (deviation if deviation > 1e-12 * magnitude else magnitude) or 1.0
+self.spread = magnitude or 1.0

judge/tolerance.py: no root mean square
    judge/test_tolerance.py
-elif not rms_error <= self._allowed_rms:
+elif False:

judge/tolerance.py: nan is not looked for
    judge/test_tolerance.py
-            complaint = self._wrongly_special(name, actual)
+            complaint = None

judge/tolerance.py: shapes may differ
    judge/test_tolerance.py
-if actual.shape != self._shape:
+if actual.numel() != self.float64.numel():

judge/tolerance.py: decisions excuse all
    judge/test_tolerance.py
-SLACK * self._decisions()).clamp(min=0)
+SLACK * self._decisions().max()).clamp(min=0)

judge/tolerance.py: blunt passes
    judge/test_tolerance.py
-            if not (max_error <= NEAR or self._is_near_eager(actual)):
+            if False:

judge/tolerance.py: all is near eager
    judge/test_tolerance.py
-largest_difference(actual, self._blunt_eager) <= NEAR * self.spread
+True

judge/special.py: eager PyTorch leaks no NaN
    judge/test_special.py
-finite = torch.isfinite(true) & torch.isfinite(in_eager)
+finite = torch.isfinite(true)

judge/special.py: each element is excused
    judge/test_special.py::test_the_rest_may_not_where_each_element_is_computed_alone
-and not (changed & ~special).any():
+and False:

judge/special.py: samples of many special values are excused
    judge/test_special.py::test_a_sample_of_many_special_values_where_the_original_is_finite
-(held > 1))
+(held < 0))

judge/probes.py: no minus infinity
    judge/test_problems.py::test_the_wrong_one_fails_for_its_reason[softmax]
-        first[: (len(first) + 1) // 2] = -math.inf
+        pass

judge/probes.py: no sample of zeros
    judge/test_exhibits.py::test_the_verdict_and_its_reason[wrong-divides_by_the_largest]
-        value[1] = 0
+        pass

tensors.py: a copy's functions use the layers of the original
    test_tensors.py judge/test_problems.py
-functions, memo = _closures(attributes), {}
+functions, memo = [], {}

judge/mutants.py: the original takes every input
    judge/test_problems.py::test_a_copy_of_an_odd_original_passes
-    except Exception:
-        return None
+    except ZeroDivisionError:
+        return None

worker/candidate.py: every parameter is in use
    judge/test_problems.py::test_a_copy_of_an_odd_original_passes
-if is_cut and any(gradients.get(name) is not None for name, _ in self.model.named_parameters()):
+if is_cut:

worker/referee.py: every original runs in inference_mode
    judge/test_problems.py::test_a_copy_of_an_odd_original_passes
-            side_effects.append("inference_mode")
+            pass

driver/verdict.py: the original leaves its parameters alone
    judge/test_problems.py::test_a_copy_of_an_odd_original_passes
-if "weights unchanged" in self._referee.side_effects and
+if False and

driver/verdict.py: a tuple is as good as a tensor
    judge/test_exhibits.py::test_the_verdict_and_its_reason[wrong-tuple_of_one]
-if required and ran["form"] != prepared["form"]:
+if False:

driver/verdict.py: what the emulator finds at other sizes is the verdict
    driver/test_runner.py::test_what_the_emulator_finds_at_other_sizes_is_a_caveat_and_the_rest_is_judged
-            if not _is_its_own(failure):
+            if failure.is_finding or not _is_its_own(failure):

driver/session.py: a renewed process has no emulated device
    driver/test_runner.py::test_what_the_emulator_finds_at_other_sizes_is_a_caveat_and_the_rest_is_judged
-            load(another)
+            load_candidate(another, self._original, task, self._options, self._referee.weights)

worker/candidate.py: upstream gradients are contiguous
    judge/test_exhibits.py::test_the_verdict_and_its_reason[wrong-gradient_as_an_array]
-        if is_normal:
+        if False:

worker/candidate.py: gradients in part are as they come
    judge/test_exhibits.py::test_the_verdict_and_its_reason[wrong-half_the_gradient_in_a_first_layer]
    judge/test_exhibits.py::test_the_verdict_and_its_reason[wrong-no_gradient_from_frozen_weights]
-if is_normal and not is_cut:
+if False:

judge/probes.py: no sample is large and negative
    judge/test_probes.py
-value[-1] = -value[-1].abs()
+pass

judge/sizes.py: both dimensions of a square are the batch
    judge/test_sizes.py
-sum(a == value != b for a, b in sides) < 2
+True

judge/behaviour.py: requires_grad of the input may change
    judge/test_exhibits.py::test_the_verdict_and_its_reason[wrong-wants_a_gradient_of_its_input]
-if value.requires_grad != self._wants.get(name, value.requires_grad):
+if False:

judge/behaviour.py: an input has the shape that it had
    judge/test_behaviour.py::test_a_call_that_gives_its_input_another_shape_can_be_tried_out
- and held[i].shape == content[i].shape]
+]

judge/precision.py: 16 bits stay 16 bits in the reference
    judge/test_oracle.py
-_PROMOTED = (torch.float32, *tensors.HALF.values())
+_PROMOTED = (torch.float32,)

judge/behaviour.py: a view of the input is an earlier output
    judge/test_behaviour.py
-earlier = {storage(output) for output in kept if output.numel()} - given
+earlier = {storage(output) for output in kept if output.numel()}

judge/precision.py: what is drawn into an argument stays there
    judge/test_oracle.py
-if argument.is_write and _is_wide(given):
+if False:

judge/precision.py: of a sum only the result is off
    judge/test_precision.py
-positions = _SUMS.get(function) or self._operands(function)[1]
+positions = self._operands(function)[1]

judge/precision.py: a norm is one step
    judge/test_oracle.py
-if function in self._steps:
+if False:

driver/verdict.py: a crash hides a failure
    judge/test_exhibits.py
-if not case.has_failed or
+if True or

worker/candidate.py: a file's fallback is judged where there is no GPU
    cuda_emulator/test_devices.py::test_a_file_that_goes_on_without_its_kernel_where_there_is_no_gpu_runs_it
-is_done = not (self._may_emulate_device and self.text.cuda_kernels) or emulator.launches()
+is_done = True

worker/candidate.py: what breaks in the judge is the variant's complaint
    worker/test_candidate.py::test_a_mistake_of_the_judge_s_is_no_complaint_about_the_variant
- or self.builds.failure or is_of_judge(exception):
+ or self.builds.failure:

driver/verdict.py: what breaks in the judge is a caveat
    judge/test_standards.py::test_what_breaks_in_the_judge_is_no_caveat
-failure.is_of_machine or failure.is_of_judge or
+failure.is_of_machine or

judge/probes.py: scaled is uniform
    judge/test_probes.py
-map(_each, (_within, _scaled, _large, _small, _ramp))
+map(_each, (_within, lambda value: value, _large, _small, _ramp))

judge/probes.py: no impulse
    judge/test_probes.py
-samples.scatter_(1, where, 16 * (1 + torch.rand(where.shape, dtype=value.dtype)))
+samples.normal_()

judge/probes.py: ramp without slope
    judge/test_probes.py
-return (along + offset).to(value.dtype)
+return (0 * along + offset).to(value.dtype)

worker/referee.py: stale are all weights or none
    judge/test_exhibits.py::test_the_verdict_and_its_reason[wrong-packs_weights_as_it_is_made]
-(frozenset(step), matrices, frozenset(step) - matrices))):
+(frozenset(step),))):

judge/probes.py: nothing is trained before eval mode
    judge/test_problems.py::test_the_wrong_one_fails_for_its_reason[linear_batch_norm]
-    model(*inputs)
-    modes = {
+    modes = {

judge/probes.py: eval mode is not tried
    judge/test_problems.py::test_the_wrong_one_fails_for_its_reason[linear_batch_norm]
-    model.eval()
+    pass

worker/candidate.py: earlier calls count in eval mode
    judge/test_problems.py::test_the_right_one_passes[linear_batch_norm]
-                value.copy_(first if first.shape == value.shape else value)
+                pass

judge/probes.py: step is not taken
    judge/test_probes.py judge/test_exhibits.py::test_the_verdict_and_its_reason[wrong-packs_weights_once]
-parameters[name].sub_(change.to(parameters[name]))
+pass

driver/verdict.py: gradients are not compared
    worker/test_failures.py
-        wrong = [complaint for complaint in found if complaint not in unjudged]
+        wrong = []

judge/oracle.py: host memory that is not to be had ends the reference
    judge/test_oracle.py::test_host_memory_that_does_not_hold_the_whole_batch
-NO_HOST_MEMORY.search(str(error))
+False

judge/oracle.py: the reference in float32
    judge/test_oracle.py
-for module in model.double().modules():
+for module in model.modules():

judge/oracle.py: what an original writes to in float64 stays so
    judge/test_problems.py::test_the_right_one_passes[running_mean]
-is_copied = [in_double and tensors.differentiable(v) and v.dtype != torch.float64 for v in probe.inputs]
+is_copied = [in_double for v in probe.inputs]

worker/referee.py: an original that writes to its inputs runs on no probe with gradients
    judge/test_problems.py::test_the_right_one_passes[running_mean]
-        if "a leaf Variable that requires grad is being used in an in-place operation" not in str(error):
+        if True:

judge/oracle.py: chunks of what is not separable
    judge/test_oracle.py
-if apart is None or apart.shape != whole.shape or not torch.allclose(apart, whole, equal_nan=True):
+if False:

judge/oracle.py: chunks lose weight gradients
    judge/test_oracle.py
-torch.stack(pieces).sum(0)
+pieces[0]

driver/verdict.py: outputs are not compared
    judge/test_problems.py::test_the_wrong_one_fails_for_its_reason[gelu]
-        if entry["complaint"]:
+        if False:

driver/verdict.py: only the problem's own inputs
    judge/test_exhibits.py::test_the_verdict_and_its_reason[wrong-infinity_leaks]
-        self._probe_further()
-
+

judge/behaviour.py: inputs may be written
    judge/test_behaviour.py
-return f"changes {name}"
+return None

judge/behaviour.py: version counters are ignored
    judge/test_behaviour.py
-if value._version != self._versions[name]:
+if False:

judge/behaviour.py: memory may be shared
    judge/test_behaviour.py
-if output.numel() and storage(output) in owners:
+if False:

judge/behaviour.py: content may be remembered
    judge/test_behaviour.py judge/test_exhibits.py::test_the_verdict_and_its_reason[wrong-remembers_by_content]
-        if again < first:
+        if False:

judge/behaviour.py: addresses may be remembered
    judge/test_behaviour.py judge/test_exhibits.py::test_the_verdict_and_its_reason[wrong-remembers_by_address]
-of="second", complaint=None if seen else "a change of one element is not seen")
+of="first")

judge/behaviour.py: minus zero is zero
    judge/test_behaviour.py
-return torch.equal(a.contiguous().view(whole), b.contiguous().view(whole))
+return torch.equal(a, b)

judge/behaviour.py: results may differ from run to run
    judge/test_behaviour.py judge/test_exhibits.py::test_the_verdict_and_its_reason[wrong-differs_from_run_to_run]
-if same(first, again) or self._declared is False:
+if True:

judge/work.py: decoration passes
    judge/test_work.py
-                if not _same(value, old):
-                    self._spoil(value)
+                pass

judge/work.py: nothing is spoiled
    judge/test_work.py judge/test_exhibits.py::test_the_verdict_and_its_reason[honest-own_kernel]
-tensor.copy_(10 * torch.randn(tensor.shape, dtype=torch.float32))
+pass

worker/candidate.py: weights by chance
    worker/test_candidate.py
-    model.load_state_dict(weights)
+    pass

tensors.py: clean memory
    worker/test_candidate.py
-    torch.utils.deterministic.fill_uninitialized_memory = True
+    torch.utils.deterministic.fill_uninitialized_memory = False

worker/candidate.py: the variant gives the inputs
    worker/test_candidate.py
-self.problem = tensors.in_precision(_kept(catalog.load_problem(problem, settings)), precision)
+self.problem = tensors.in_precision(catalog.load_problem(problem, settings), precision)

worker/process.py: forged replies count
    judge/test_exhibits.py::test_the_verdict_and_its_reason[wrong-forges_a_type]
-                if complaint := malformed(what, result):
+                if complaint := None:

worker/replies.py: negative memory is a reply
    worker/test_replies.py
-return number(value) and math.isfinite(value) and value >= 0
+return number(value)

machine/load.py: orphans live on
    worker/test_process.py
-if session in sessions:
+if False:

worker/channel.py: messages are cut
    worker/test_channel.py
-data = data[os.write(self._write_fd, data) :]
+os.write(self._write_fd, data[:65536])
+                data = b''

stopwatch/statistics.py: half the confidence
    stopwatch/test_statistics.py
-/ 2**n) <= 0.05:
+/ 2**n) <= 0.5:

stopwatch/statistics.py: a tie is a win
    stopwatch/test_statistics.py
-if ratio["low"] > 1 + TIE:
+if ratio["ratio"] > 1 + TIE:

stopwatch/statistics.py: the control widens nothing
    driver/test_timing.py::test_a_claim_is_only_as_narrow_as_the_control
-"low": ratio["low"] / max(1.0, control["high"]),
+"low": ratio["low"],

stopwatch/timer.py: the flush is timed
    stopwatch/test_timer.py
-            self._content = content = self.workload.fresh(seed)
-            self._clock.flush()
-            milliseconds, is_late, self._result = self._clock.time(lambda content=content: self.workload(content))
+            self._content = content = seed
+            self._clock.flush()
+            fresh = self.workload.fresh
+            milliseconds, is_late, self._result = self._clock.time(lambda content=content: self.workload(fresh(content)))

stopwatch/timer.py: late writers are waited for
    stopwatch/test_timer.py
-return elapsed, False, _copy(result)
+return elapsed, False, result

stopwatch/timer.py: an old driver's host that sees late that the device is idle
    stopwatch/test_timer.py
-least = LATE_MS if self._all_streams else HOST_LAG_MS
+least = LATE_MS

stopwatch/timer.py: work on other streams begins while the current one waits
    stopwatch/test_timer.py
-            self._all_streams.wait_for(start)
+            pass

stopwatch/timer.py: work on other streams is not waited for
    stopwatch/test_timer.py
-            self._all_streams.awaited_by(stream)
+            pass

stopwatch/timer.py: a busy host is not waited for
    stopwatch/test_timer.py
-HEAD_START_SHARE * max(self._launches_ms)
+HEAD_START_SHARE * 0.0

stopwatch/workload.py: the same content each time
    stopwatch/test_workload.py
-    torch.manual_seed(seed)
-    return tensors.inputs_of(problem)
+    torch.manual_seed(0)
+    return tensors.inputs_of(problem)

stopwatch/baselines.py: strict permits tf32
    stopwatch/test_baselines.py
-"ieee") for flag in _PRECISIONS if baseline.strict]
+"tf32") for flag in _PRECISIONS if baseline.strict]

stopwatch/baselines.py: strict variants meet tf32 baselines
    stopwatch/test_baselines.py driver/test_timing.py::test_outcome_is_against_the_fastest_that_is_as_precise
-return strict if strict and precision == "fp32" else alike
+return alike

stopwatch/floors.py: half of the bytes
    stopwatch/test_floors.py
-return sum(value.numel() * value.element_size() for value in values
+return sum(value.numel() * 2 for value in values

driver/timing.py: a patched stopwatch is believed
    driver/test_timing.py::test_a_difference_that_load_does_not_explain
-            if seen * (1 - taken_by_others(load, place)) > limit + EXPLAINED_BY_HOST_MS[place]:
+            if False:

driver/timing.py: timed results are not rechecked
    driver/test_timing.py::test_a_wrong_replay_is_rejected
-            if comparison["complaint"]:
-                raise Rejected(f"is right
+            if False:
+                raise Rejected(f"is right

judge/oracle.py: the original writes to the probe
    judge/test_oracle.py::test_an_original_that_writes_to_its_input_writes_to_a_copy
-return [v if copied else copies([v])[0] for v, copied in zip(probe.inputs, is_copied, strict=True)]
+return probe.inputs

judge/oracle.py: what eager draws is forgotten
    judge/test_oracle.py::test_the_first_reference_draws_what_eager_drew
-        self._draws |= oracle._draws
+

worker/candidate.py: nothing comes between forward and backward
    judge/test_exhibits.py::test_the_verdict_and_its_reason[wrong-backward_of_the_last_call]
-is_normal and self._is_cut(values, outputs)
+False

worker/candidate.py: a backward may write
    judge/test_exhibits.py::test_the_verdict_and_its_reason[wrong-backward_writes_upstream]
-if written := effects and effects.writes():
+if written := None:

judge/behaviour.py: what a few elements tell is remembered
    judge/test_behaviour.py::test_a_result_remembered_by_a_few_of_its_elements
-                if stale == STALE:
-                    return False
+

judge/behaviour.py: the same tensor is known again
    judge/test_behaviour.py::test_a_result_remembered_by_the_tensor_and_its_version
-for inputs in (new, copies(new)):
+for inputs in (copies(new),):

judge/behaviour.py: two buffers in turn
    judge/test_behaviour.py::test_an_output_that_is_overwritten[two_buffers]
-while count <= LATER_CALLS or
+while count < 1 or

driver/verdict.py: zeros are compared with zeros
    judge/test_problems.py::test_the_wrong_one_fails_for_its_reason[seldom_positive]
-key=self._uniform.__contains__
+key=lambda probe: 0

driver/timing.py: one timing may use up a run's patience
    driver/test_timing.py::test_one_timing_does_not_use_up_what_a_whole_run_has_for_a_busy_machine
-self._measured.patience.portion(self._options.patience([]))
+self._measured.patience

driver/timing.py: work on other streams is not told
    driver/test_timing.py::test_work_on_other_streams_is_told
-            notes.append(LATE_NOTE)
+            pass

driver/race.py: disturbed rounds count
    driver/test_timing.py::test_rounds_that_others_disturb_do_not_count
-        if disturbed:
-            for side in running:
-                side.set_last_aside()
+        if disturbed:

driver/race.py: a control that is off is no sign
    driver/test_timing.py::test_signs_of_a_disturbance
-if ratio and abs(ratio["ratio"] - 1) > allowed
+if False

driver/race.py: launches are alike in all processes
    driver/test_timing.py::test_launches_differ_between_two_processes_by_more_than_the_control_of_two_others_shows
-else LAUNCHES_DIFFER
+else 0.0

driver/race.py: a GPU that others use in turns counts
    driver/test_timing.py::test_signs_of_a_disturbance
-return took > SLOW_FLUSH * self._quiet.flush_ms
+return False

driver/race.py: far baselines are timed to the end
    driver/test_timing.py::test_a_baseline_far_from_the_fastest_is_not_timed_longer_than_an_interval_takes
-if side in that_matter or side.median <= far]
+]

driver/timing.py: a variant's own work excuses its clock
    driver/test_timing.py::test_on_a_gpu_that_another_process_uses_the_drivers_clock_says_nothing
-        with self._alone(None):
-            return race.is_shared()
+        return race.is_shared()

driver/timing.py: the default stream's launches are captured
    driver/test_timing.py::test_what_no_graph_can_hold_is_not_captured[default-stream]
-not NO_GRAPH & _tags(result)
+"no-graph" not in _tags(result)

driver/timing.py: a control counts for its own timing alone
    driver/test_timing.py::test_an_earlier_timing_s_control_widens_a_later_one_s_interval
-statistics.spanning(self._controls[mode], race.luck()) if mode in self._controls
+control if control

judge/behaviour.py: inference mode's state meets the next trial
    judge/test_behaviour.py::test_a_state_kept_of_inference_mode_is_one_for_later_calls
-            _forget_inference(self._model)
+            pass

driver/race.py: last rounds are not rechecked
    driver/test_timing.py::test_results_of_the_last_rounds_are_rechecked_too
-recheck_in.add(self._played + secrets.randbelow(ROUNDS_BETWEEN_LOOKS))
+pass

driver/cluster.py: what a lost worker had is not tried again
    driver/test_cluster.py::test_the_pair_of_a_lost_worker_is_tried_again
-RETRIES = 2
+RETRIES = 0

driver/session.py: a session is closed at once
    driver/test_runner.py::test_a_bench_is_made_once_and_closed_after_the_last_use
-            if not self._uses_left:
-                self.close()
+            self.close()

machine/build_locks.py: living builders are overlooked
    machine/test_build_locks.py
-    holders = _holders() if locks else {}
+    holders = {}

machine/requirements.py: any toolkit fits
    machine/test_requirements.py
-    if toolkit.major != major:
-        what
+    if False:
+        what

machine/load.py: a process's own load is others'
    machine/test_load.py
-- (self._own_seconds() - own)

machine/load.py: a worker counts as itself and as its driver's child
    machine/test_load.py
-list(dict.fromkeys(found))
+found

nvidia/sanitizer.py: a blind tool is trusted
    nvidia/test_sanitizer.py
-    if not controls:
-        return
+    if False:
+        return

nvidia/sanitizer_reports.py: unreadable reports are skipped
    nvidia/test_sanitizer_reports.py
-    if at is None:
-        raise Unreadable(headline)
+    if at is None:
+        return []

nvidia/metrics.py: launches weigh the same
    nvidia/test_metrics.py
-known = [(launch[metric], launch[TIME] or 1.0)
+known = [(launch[metric], 1.0)

report/contract.py: what failed may be timed
    report/test_document.py
-for key in ("time_ms", "speedup", "training") if verdict not in TIMED else ():
+for key in ():

report/contract.py: times in any order
    report/test_document.py
-**dict.fromkeys(("median", "p20", "p80"), number), WHOLE: _rising("p20", "median", "p80")}
+**dict.fromkeys(("median", "p20", "p80"), number)}

report/document.py: nan in json
    report/test_document.py
-return None if isinstance(value, float) and not math.isfinite(value) else value
+return value

report/publish.py: stale results are published
    report/test_publish.py
-if _is_stale(root, result)}
+if False}

report/text.py: escapes reach the terminal
    report/test_figures.py report/test_terminal.py
-return "".join(c if c.isprintable() else " " for c in str(line))
+return str(line)

report/against.py: one ratio is enough
    report/test_against.py
-return row | {"verdict": sides[0] if sides[0] == sides[1] else SAME}
+return row | {"verdict": sides[0]}

report/against.py: runs on different gpus compare
    report/test_against.py
-for name, then, now in pairs if then != now)
+for name, then, now in [])

catalog.py: constants that a model lacks are taken
    command/test_bad_input.py::test_a_command_line
-    if unknown := [name for name in names if name not in known]:
+    if unknown := []:

catalog.py: no near name is told
    command/test_bad_input.py::test_a_command_line
-get_close_matches(str(name_or_path), [*known, *short], n=1)
+get_close_matches(str(name_or_path), [], n=1)

command/needs.py: what the sanitizer cannot see is run
    command/test_bad_input.py::test_a_command_line
-    if not any(task.place == "cuda" for task in tasks):
-        missing
+    if False:
+        missing

command/main.py: a failure is a success
    nvidia/test_profiler.py
-return IMPOSSIBLE if complaint.is_machine else FAILED
+return PASSED

cuda_emulator/devices.py: what a file replaces in torch.cuda is put back
    cuda_emulator/test_devices.py::test_what_a_file_replaces_meanwhile_is_not_hidden
-            if getattr(owner, name) is replacement:
+            if True:

cuda_emulator/include/emulator/ptx.h: products lose their last term
    cuda_emulator/test_hardware_bits.py
-for (int k = 0; k < K; ++k) sum
+for (int k = 0; k < K - 1; ++k) sum

cuda_emulator/include/emulator/warp.h: votes of the neighbour
    cuda_emulator/test_hardware_bits.py
-ballot |= unsigned(rows[lane * ROW]) << lane;
+ballot |= unsigned(rows[lane * ROW]) << (lane ^ 1);

cuda_emulator/include/emulator/half_types.h: half products are sums
    cuda_emulator/test_hardware_bits.py
-EMULATOR_NUMBER16_BINARY(__hmul, x* y)
+EMULATOR_NUMBER16_BINARY(__hmul, x + y)

cuda_emulator/runtime/shadow.cpp: races with a write go unseen
    cuda_emulator/test_kernel_pairs.py
-        report_race(s, writer, c.writer_instruction, c.writer & ATOMIC ? "atomically updated" : "wrote");
+        (void)writer;

cuda_emulator/runtime/shadow.cpp: shuffles order memory
    cuda_emulator/test_kernel_pairs.py
-    if (op != WarpOp::sync) return;

cuda_emulator/runtime/shadow.cpp: bytes beyond a tensor
    cuda_emulator/test_kernel_pairs.py
-s.address + s.bytes > uintptr_t(a->begin) + a->bytes) report_bounds(s);
+s.address > uintptr_t(a->begin) + a->bytes) report_bounds(s);

cuda_emulator/runtime/barriers.cpp: any barrier will do
    cuda_emulator/test_kernel_pairs.py
-const bool elsewhere = b.arrived && (b.barrier_line != line || b.barrier_site != site);
+const bool elsewhere = false;

cuda_emulator/runtime/shadow.cpp: copies land at once
    cuda_emulator/test_kernel_pairs.py
-        if (writer >= oldest) report_in_flight(s, c);
"""


@dataclass(frozen=True)
class Fault:
    """`old` in the file at `path` becomes `new`; each of `tests` is to fail."""

    path: Path
    what: str
    tests: list
    old: str
    new: str

    def __str__(self):
        return f"{self.path}: {self.what}"

    @classmethod
    def read(cls, paragraph):
        """Of a paragraph of TABLE."""
        (title, *lines), sides = paragraph.split("\n"), {"-": [], "+": [], " ": []}
        for line in lines:
            sides[line[0]].append(line[1:])
        file, _, what = title.partition(": ")
        return cls(
            Path(file) if file.startswith("cuda_emulator/") else Path("playground") / file,
            what,
            " ".join(sides[" "]).split(),
            "\n".join(sides["-"]),
            "\n".join(sides["+"]),
        )

    def gone(self):
        """What it names and the checkout has not: a test, or its text; None where all is there."""
        for test in self.tests:
            file, _, name = test.partition("::")
            if not (ROOT / "tests" / file).is_file() or f"def {name.split('[')[0]}" not in _read(Path("tests") / file):
                return test
        return None if _read(self.path).count(self.old) == 1 else self.old


def _read(path):
    return (ROOT / path).read_text(encoding="utf-8")


FAULTS = [Fault.read(paragraph) for paragraph in TABLE.strip("\n").split("\n\n")]


def copy_of_checkout(folder):
    """A copy of all that git knows, and of what it would take, in the folder."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True
    ).stdout.split(b"\0")
    for name in filter(None, listed):
        source, target = ROOT / os.fsdecode(name), folder / os.fsdecode(name)
        if source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(source.read_bytes())
    return folder


def first_failure(checkout, test, but=()):
    """Of a test (a file, or FILE::TEST, from the checkout's root) the first that fails and is not in `but`; None for none."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        test,
        *(f"--deselect={each}" for each in but),
    ]
    told = subprocess.run(command, cwd=checkout, capture_output=True, text=True).stdout
    failed = re.search(r"^(?:FAILED|ERROR) (tests/.+?::.+?)(?: - |$)", told, re.MULTILINE)
    return failed and failed[1]


def noticing(fault, checkout, test):
    """The first of a test that fails with the fault and not without it; None where there is none."""
    path = checkout / fault.path
    text = path.read_text(encoding="utf-8")
    fails_anyway = []
    while True:
        path.write_text(text.replace(fault.old, fault.new), encoding="utf-8")
        try:
            failed = first_failure(checkout, test, fails_anyway)
        finally:
            path.write_text(text, encoding="utf-8")
        if failed is None or first_failure(checkout, failed) is None:
            return failed
        fails_anyway.append(failed)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", metavar="WORD", help="a part of a fault's file or name; default: all faults")
    parser.add_argument("--list", action="store_true", help="seed nothing")
    given = parser.parse_args()
    named = [each for each in FAULTS if not given.words or any(word in str(each) for word in given.words)]
    chosen = [each for each in named if not each.gone()]
    unnoticed = len(named) - len(chosen)
    for fault in named:
        if fault not in chosen:
            print(f"{fault}: GONE: {fault.gone()}")
        elif given.list:
            print(f"{fault}: {' '.join(fault.tests)}")
    if given.list:
        return int(bool(unnoticed))
    with tempfile.TemporaryDirectory(prefix="seeded-faults-") as folder:
        checkout = copy_of_checkout(Path(folder))
        for fault in chosen:
            for test in fault.tests:
                noticed = noticing(fault, checkout, f"tests/{test}")
                unnoticed += noticed is None
                print(f"{fault}: {noticed or f'UNNOTICED by {test}'}", flush=True)
    print(f"{len(named)} faults; not noticed, by a test that is to: {unnoticed}")
    return int(bool(unnoticed))


if __name__ == "__main__":
    sys.exit(main())
