// A test is a function; a claim that does not hold ends the program with its line.
#pragma once

#include <cstdio>
#include <cstdlib>

#define CHECK(claim)                                                         \
  do {                                                                       \
    if (!(claim)) {                                                          \
      std::fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #claim); \
      std::abort();                                                          \
    }                                                                        \
  } while (false)

#define RUN(test)                       \
  do {                                  \
    test();                             \
    std::printf("%s: ok\n", #test);     \
    std::fflush(stdout);                \
  } while (false)
