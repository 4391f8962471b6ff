//! Attention, by sequence and head.
//!
//! For each head the keys are packed transposed and the values as they are, so that both products
//! run on the same tiles as the weights. Scores are made for a block of queries at a time: their
//! size grows with the length of the sequence, not with its square.

use std::ops::Range;
use std::sync::Mutex;

use super::forward::OutputRows;
use crate::kernel::product::PackedView;
use crate::kernel::{Accumulate, Activation, AlignedBuffer, PANEL, Product, simd};
use crate::thread_group::ThreadGroup;

/// Queries per block of scores.
const BLOCK: usize = 96;
/// Distances from here on share MPNet's last bucket.
const FARTHEST: f32 = 128.0;

#[derive(Default)]
pub(super) struct AttentionScratch {
    keys: AlignedBuffer,
    values: AlignedBuffer,
    scores: AlignedBuffer,
    output: AlignedBuffer,
    distance_bias: Vec<f32>,
}

pub(super) struct AttentionInput<'a> {
    /// Query, key and value of each token side by side.
    pub(super) fused: &'a [f32],
    pub(super) hidden: usize,
    pub(super) heads: usize,
    pub(super) relative_bias: &'a [f32],
    pub(super) output_rows: OutputRows,
}

/// Fills `context` with one row per token, or per sequence where only the first token is output_rows.
pub(super) fn run(
    threads: &ThreadGroup,
    scratch: &mut Vec<AttentionScratch>,
    input: &AttentionInput<'_>,
    spans: &[Range<usize>],
    context: &mut [f32],
) {
    let AttentionInput { hidden, heads, .. } = *input;
    let width = hidden / heads;
    let slots = if threads.size() == 1 { 1 } else { heads };
    scratch.resize_with(scratch.len().max(slots), AttentionScratch::default);
    if slots == 1 {
        for head in 0..heads {
            head_of_all(
                &mut scratch[0],
                input,
                spans,
                head,
                &mut HeadOutput {
                    rows: &mut context[head * width..],
                    stride: hidden,
                },
            );
        }
        return;
    }
    // Heads interleave in a row of the context, so each thread fills rows of its own first.
    let results: Vec<Mutex<(&mut AttentionScratch, AlignedBuffer)>> = scratch
        .iter_mut()
        .take(heads)
        .map(|scratch| {
            let output = std::mem::take(&mut scratch.output);
            Mutex::new((scratch, output))
        })
        .collect();
    let rows = context.len() / hidden;
    threads.for_each(heads, &|head| {
        if let Ok(mut slot) = results[head].lock() {
            let (scratch, output) = &mut *slot;
            let mut output = HeadOutput {
                rows: output.reserve(rows * width),
                stride: width,
            };
            head_of_all(scratch, input, spans, head, &mut output);
        }
    });
    for (head, result) in results.into_iter().enumerate() {
        let Ok((scratch, output)) = result.into_inner() else {
            continue;
        };
        for (row, part) in context
            .chunks_exact_mut(hidden)
            .zip(output.as_slice().chunks_exact(width))
        {
            row[head * width..][..width].copy_from_slice(part);
        }
        scratch.output = output;
    }
}

/// Destination of the rows of one head.
struct HeadOutput<'a> {
    rows: &'a mut [f32],
    stride: usize,
}

fn head_of_all(
    scratch: &mut AttentionScratch,
    input: &AttentionInput<'_>,
    spans: &[Range<usize>],
    head: usize,
    output: &mut HeadOutput<'_>,
) {
    let mut row = 0;
    for span in spans {
        let queries = if input.output_rows == OutputRows::First {
            1
        } else {
            span.len()
        };
        pack(scratch, input, span, head);
        for block in (0..queries).step_by(BLOCK) {
            let block = block..queries.min(block + BLOCK);
            let at = (row + block.start) * output.stride;
            score_block(
                scratch,
                input,
                span,
                head,
                block,
                &mut output.rows[at..],
                output.stride,
            );
        }
        row += queries;
    }
}

fn pack(scratch: &mut AttentionScratch, input: &AttentionInput<'_>, span: &Range<usize>, head: usize) {
    let AttentionInput {
        fused,
        hidden,
        heads,
        relative_bias,
        ..
    } = *input;
    let (width, stride, length) = (hidden / heads, 3 * hidden, span.len());
    let tokens = &fused[span.start * stride..span.end * stride];
    let keys = scratch.keys.reserve(length.next_multiple_of(PANEL) * width);
    simd::pack_transposed(
        simd::Isa::detect(),
        &tokens[hidden + head * width..],
        stride,
        width,
        length,
        keys,
    );

    let values = scratch.values.reserve(width.next_multiple_of(PANEL) * length);
    for (panel, lines) in values.chunks_exact_mut(length * PANEL).enumerate() {
        let column = panel * PANEL;
        let columns = PANEL.min(width - column);
        let from = 2 * hidden + head * width + column;
        for (line, token) in lines.chunks_exact_mut(PANEL).zip(tokens.chunks_exact(stride)) {
            line[..columns].copy_from_slice(&token[from..from + columns]);
            line[columns..].fill(0.0);
        }
    }
    if !relative_bias.is_empty() {
        distance_bias(&mut scratch.distance_bias, relative_bias, heads, head, length);
    }
}

fn score_block(
    scratch: &mut AttentionScratch,
    input: &AttentionInput<'_>,
    span: &Range<usize>,
    head: usize,
    queries: Range<usize>,
    output: &mut [f32],
    output_stride: usize,
) {
    let (isa, solo) = (simd::Isa::detect(), ThreadGroup::solo());
    let (width, length) = (input.hidden / input.heads, span.len());
    let stride = length.next_multiple_of(PANEL);
    let scores = scratch.scores.reserve(queries.len() * stride);
    let biased = !input.relative_bias.is_empty();
    if biased {
        // Entry `length - 1 + key - query` belongs to that distance, so a query's row is a window.
        for (row, query) in scores.chunks_exact_mut(stride).zip(queries.clone()) {
            row[..length].copy_from_slice(&scratch.distance_bias[length - 1 - query..][..length]);
        }
    }
    let keys = scratch.keys.as_slice();
    let product = Product {
        a: &input.fused[(span.start + queries.start) * 3 * input.hidden + head * width..],
        lda: 3 * input.hidden,
        rows: queries.len(),
        b: PackedView {
            depth: width,
            columns: length,
            panels: keys,
        },
        bias: None,
        accumulate: if biased {
            Accumulate::Add
        } else {
            Accumulate::Overwrite
        },
        activation: Activation::Identity,
    };
    simd::run(isa, &solo, &product, scores, stride);
    simd::softmax(isa, scores, stride, length);
    let product = Product {
        a: scores,
        lda: stride,
        rows: queries.len(),
        b: PackedView {
            depth: length,
            columns: width,
            panels: scratch.values.as_slice(),
        },
        bias: None,
        accumulate: Accumulate::Overwrite,
        activation: Activation::Identity,
    };
    simd::run(isa, &solo, &product, output, output_stride);
}

/// MPNet's bias of one head for every distance from `-(length - 1)` to `length - 1`.
fn distance_bias(into: &mut Vec<f32>, table: &[f32], heads: usize, head: usize, length: usize) {
    let buckets = table.len() / heads;
    let last = length as i64 - 1;
    into.clear();
    into.extend((-last..=last).map(|distance| table[bucket(distance, buckets) * heads + head]));
}

/// Half of the buckets are for keys before the query and half for keys after it; in each half, small
/// distances have a bucket of their own and larger ones share them on a logarithmic scale.
fn bucket(key_minus_query: i64, buckets: usize) -> usize {
    let half = buckets / 2;
    let offset = if key_minus_query > 0 { half } else { 0 };
    let distance = key_minus_query.unsigned_abs() as usize;
    let exact = half / 2;
    if distance < exact {
        return offset + distance;
    }
    let scaled =
        (distance as f32 / exact as f32).ln() / (FARTHEST / exact as f32).ln() * (half - exact) as f32;
    offset + (exact + scaled as usize).min(half - 1)
}
