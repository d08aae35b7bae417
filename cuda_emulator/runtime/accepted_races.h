// Races that the text accepts: `// emulator: benign race` stands on a line of one of the two accesses.
#pragma once

namespace emulator {

// Is the access by this instruction, or the other one, on such a line? Counts it if so.
bool is_accepted_race(const void* instruction, const void* other);

}  // namespace emulator
