// Expert parallelism: the ranks of a group, each with its own tokens and its own experts, and how a token's row finds
// the rank of an expert and the result its way back. Plain C++, as arguments.h, whose legend holds.
//
// One *exchange* is one pass (forward, or backward) of one block over all ranks, or a turn of it:
//
//   publish   every rank copies its rows (x, or dy) and its routing into its window and tells the others so; itself it
//             uses them where they were
//   collect   every rank reads the routing of all ranks: from here on it works on the tokens of all ranks as if they
//             were its own, number source * capacity + token, of which those without an expert here have none
//   pull      the rows that are needed here are read from the other ranks' windows, each once
//   push      the sum over a token's slots here goes into its rank's window, one row for each pair of ranks
//   sum       every rank adds up what the ranks have pushed, in order of the ranks
//
// A pass may take several exchanges, *turns*: each rank's tokens in parts of at most `capacity`, one part after the
// other, and in backward the last one first. What is read from other ranks then has room for a turn's tokens only:
// backward reads again what forward has read, but for the last turn, whose tokens are still there.
//
// Nothing but the two flags of a pair of ranks (published, finished) tells them of each other, and what comes with the
// first. No window needs to be double: a rank publishes again only once all ranks have finished, hence read; it is
// written into only after it has published again, hence has summed.
#pragma once

#include "arguments.h"

namespace mok::sm90 {

constexpr int kMaxRanks = 72;

// Where things lie in a window, in bytes. The same on all ranks.
struct Window {
  int64_t ids;      // [capacity][K] int32, -1: no expert
  int64_t weights;  // [capacity][K] float
  int64_t rows;     // [capacity][H]
  int64_t again;    // the same for the rows of forward that backward reads again, if there are turns
  int64_t sums;     // [ranks][capacity][H], or [capacity][K][H] if routes are sent one by one
  int64_t scores;   // [capacity][K] float
  int64_t bytes;

  // In ints, at the start: the first fault of any rank, see Fault; by rank, what it has said: that it has published and
  // that it has finished, how many tokens it has, and which call this is to it.
  enum Header : int {
    kClaimed,
    kFault,
    kPublished = 16,
    kFinished = kPublished + kMaxRanks,
    kTokens = kFinished + kMaxRanks,
    kCall = kTokens + kMaxRanks,
    kHeader = kCall + kMaxRanks
  };
  static constexpr int64_t kHeaderBytes = 2048;
  static_assert(kHeader * 4 <= kHeaderBytes);

  static Window of(int64_t ranks, int64_t capacity, int64_t hidden, int64_t top_k, bool routes, int64_t turns) {
    const auto round = [](int64_t bytes) { return (bytes + 255) / 256 * 256; };
    Window w{};
    w.ids = kHeaderBytes;
    w.weights = w.ids + round(capacity * top_k * 4);
    w.rows = w.weights + round(capacity * top_k * 4);
    w.again = w.rows + round(capacity * hidden * 2);
    w.sums = turns > 1 ? w.again + round(capacity * hidden * 2) : w.again;
    w.scores = w.sums + round((routes ? top_k : ranks) * capacity * hidden * 2);
    w.bytes = w.scores + round(capacity * top_k * 4);
    return w;
  }
};

// What went wrong first, on which rank: kFault holds the kind, the ints after it the numbers. All ranks get to know it,
// leave their waits, and write NaN; the host finds it in `Group::report` at its next call.
enum class Fault : int {
  kNone,
  kNotPublished,  // `peer` did not publish in time
  kNotFinished,   // `peer` did not finish in time
  kTokens,        // `peer` has `have` tokens, there is room for `room`
  kRows,          // `have` rows came to `rank`, there is room for `room`
  kStuck,         // a wait inside the kernels, at Site `have`
  kRefused,       // `peer` cannot take part: its host has raised an error
  kOtherCall,     // `peer` runs another block, or another pass
};
struct FaultNumbers {
  static constexpr int kRank = 1, kPeer = 2, kExchange = 3, kHave = 4, kRoom = 5, kCount = 6;
};

struct Group {
  int rank, ranks;
  int64_t capacity;        // tokens that a rank can have in a turn
  Window window;           // where things lie in each
  const int64_t* windows;  // on the device: the ranks' windows' addresses
  int* state;              // this rank's own counters, State ints, zero before the first exchange
  int* report;             // memory of the host: FaultNumbers::kCount ints
  int64_t timeout;         // nanoseconds

  enum State : int { kDone, kFailed, kPublishing, kPushing, kSumming, kStates = 16 };
};

// `sizes`: of this rank's tokens, but of the experts of all ranks. Unless `routed` is set, the routing stays as it was:
// ids do not tell, without tokens their address is null. `call` is a number for the block and the pass. `again` may be
// null.
struct PublishArguments {
  Group group;
  Sizes sizes;
  int call;
  bool routed;
  const void* rows;
  const void* again;
  const void* ids;
  Dtype ids_dtype;
  const void* weights;
  Dtype weights_dtype;
};
const char* publish(const PublishArguments& arguments, void* stream);

// Waits until all ranks have published, on the device.
const char* wait_published(const Group& group, void* stream);

// Waits for the same. The routing of the tokens of all ranks: ids [ranks * capacity, K], counted from this rank's first
// expert, -1 for those of other ranks, and weights.
struct CollectArguments {
  Group group;
  int64_t top_k, first_expert, experts;
  int* ids;
  float* weights;
};
const char* collect(const CollectArguments& arguments, void* stream);

// What a product that gathers rows does beside: its first `ctas` CTAs read those of the tokens that have an expert here
// into rows [(ranks - 1) * capacity, H], by their places, before they take part; 0: nothing. After that, if `again` is
// not null, those that are read again into it; the product does not wait for these.
struct Pull {
  Group group;
  void* rows;
  int experts, top_k, hidden;
  int ctas;
  void* again;
};

// Tells all ranks of a fault that the host has found.
const char* fail_all(const Group& group, Fault kind, int64_t have, int64_t room, void* stream);

// The rows of all routes one by one, for sums that have the bits of one process. Otherwise `combine` pushes.
struct PushArguments {
  Group group;
  Sizes sizes;  // of the tokens of all ranks
  Plan plan;
  const void* rows;
};
const char* push_routes(const PushArguments& arguments, void* stream);

// Tells the other ranks that this one has pushed all, unless `combine` does. With scores [ranks * capacity, K], these
// are pushed before: those of the slots that have an expert here.
struct FinishArguments {
  Group group;
  int64_t top_k;
  const int* ids;  // as collected
  const float* scores;
  const int* error;  // of the plan; null if there were no experts here
  const int* count;  // sorted rows, for which there was
  int64_t room;
};
const char* finish(const FinishArguments& arguments, void* stream);

// Tensors of `dtype` whose first element becomes NaN if the exchange has failed.
struct Marks {
  static constexpr int kMost = 6;
  void* at[kMost];
  int count;
  Dtype dtype;
};

// out [T, H], if given, = sum of what the ranks have pushed; scores [T, K], if given, as they were pushed, 0 for slots
// without an expert. `experts_per_rank` tells which rank has pushed what. Waits for all ranks and ends the exchange.
struct SumArguments {
  Group group;
  Sizes sizes;  // as for publish
  Dtype dtype;
  int64_t experts_per_rank;
  const void* ids;
  Dtype ids_dtype;
  void* out;
  Dtype out_dtype;
  void* scores;
  Dtype scores_dtype;
  // Where routes came one by one: scratch [T, K], where they lie in this rank's window, and what they are weighted with
  // (null: all one).
  int* position;
  const void* routes;
  const void* weights;
  Dtype weights_dtype;
  Marks marks;
};
const char* sum(const SumArguments& arguments, void* stream);

}  // namespace mok::sm90
