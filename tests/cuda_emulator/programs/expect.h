// The program ends with the line of the first expectation that is not met.
#pragma once
#include <stdio.h>
#include <stdlib.h>

#define EXPECT(condition)                                                           \
    do {                                                                            \
        if (!(condition)) {                                                         \
            fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition); \
            exit(__LINE__ % 256);                                                   \
        }                                                                           \
    } while (0)
