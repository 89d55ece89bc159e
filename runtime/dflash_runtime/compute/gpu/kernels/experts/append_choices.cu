// append_choices: the experts that tokens have chosen in all layers, as rows of one array. Grid: a block
// per layer.
//
// Parameters: THREADS.
#include "common.cuh"

// A layer's choice.
struct LayerChoice {
    const int *ids;  // [T, num_used]
    int first_column;
    int num_used;
};

struct AppendChoicesArgs {
    const LayerChoice *layers;
    const int *position;  // of the first token, whose row is `position` modulo num_rows; null: row 0
    int *rows;            // [num_rows, num_columns]
    int num_rows;
    int num_tokens;
    int num_columns;
};

KERNEL(append_choices, AppendChoicesArgs, THREADS, 1) {
    let_next_begin();
    wait_for_previous();
    const LayerChoice layer = a.layers[block_index_x()];
    const int first = a.position ? (int)load_fresh4(a.position) : 0;
    for (int i = thread_index(); i < a.num_tokens * layer.num_used; i += THREADS) {
        const int row = (first + i / layer.num_used) % a.num_rows;
        const int column = layer.first_column + i % layer.num_used;
        a.rows[(i64)row * a.num_columns + column] = (int)load_fresh4(layer.ids + i);
    }
}
