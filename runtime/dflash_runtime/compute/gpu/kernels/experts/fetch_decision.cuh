// Which expert a step fetches over the bus: written by mailbox_post.cuh, read by fetch_expert.cu and
// experts_decode.cu.
#pragma once
#include "common.cuh"

struct FetchDecision {
    int pair;     // the first that needs it; negative: nothing is fetched, and the others mean nothing
    int slot;     // of those that follow what is loaded
    int expert;   // its global id
    int leaving;  // the expert that it replaces; -1: none; FETCH_NOT_KEPT: it is used in this step alone
};

constexpr int FETCH_NOT_KEPT = -2;
