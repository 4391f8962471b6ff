//! The forward pass of packed sequences through the encoder.

use std::ops::Range;

use super::attention::{self, AttentionScratch};
use super::{Encoder, Layer, QuantizedRows, Sequence};
use crate::kernel::{Accumulate, Activation, AlignedBuffer};
use crate::thread_group::ThreadGroup;

/// The rows of the result that are read afterwards.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum OutputRows {
    All,
    /// The first token of each sequence. The last layer then computes only these.
    First,
}

/// Working memory of one compute thread, kept from pass to pass.
#[derive(Default)]
pub(crate) struct Scratch {
    states: AlignedBuffer,
    fused: AlignedBuffer,
    context: AlignedBuffer,
    inner: AlignedBuffer,
    first: AlignedBuffer,
    quantized: QuantizedRows,
    attention: Vec<AttentionScratch>,
    spans: Vec<Range<usize>>,
}

impl Scratch {
    /// The rows of each sequence in the result of the last pass.
    pub(crate) fn spans(&self) -> &[Range<usize>] {
        &self.spans
    }

    pub(crate) fn states(&self, width: usize) -> &[f32] {
        let rows = self.spans.last().map_or(0, |span| span.end);
        &self.states.as_slice()[..rows * width]
    }
}

impl Encoder {
    /// Leaves the last layer's output in `scratch`: one row per token, or per sequence where only
    /// the first token is output_rows.
    pub(crate) fn forward(
        &self,
        threads: &ThreadGroup,
        scratch: &mut Scratch,
        sequences: &[&Sequence],
        output_rows: OutputRows,
    ) {
        scratch.spans.clear();
        let mut end = 0;
        for sequence in sequences {
            scratch.spans.push(end..end + sequence.ids.len());
            end += sequence.ids.len();
        }
        self.embed(scratch.states.reserve(end * self.config.hidden), sequences);
        let (last, others) = match (output_rows, self.layers.split_last()) {
            (OutputRows::First, Some((last, others))) => (Some(last), others),
            _ => (None, &self.layers[..]),
        };
        for layer in others {
            self.attend(threads, scratch, layer, OutputRows::All);
            self.feed_forward(threads, scratch, layer, end);
        }
        if let Some(layer) = last {
            self.attend(threads, scratch, layer, OutputRows::First);
            let count = sequences.len();
            scratch.spans = (0..count).map(|row| row..row + 1).collect();
            self.feed_forward(threads, scratch, layer, count);
        }
    }

    /// The sum of the embeddings of word, position and type, normalized.
    fn embed(&self, states: &mut [f32], sequences: &[&Sequence]) {
        let hidden = self.config.hidden;
        let mut rows = states.chunks_exact_mut(hidden);
        for sequence in sequences {
            let mut position = self.config.first_position;
            for (index, id) in sequence.ids.iter().enumerate() {
                let Some(row) = rows.next() else { return };
                row.copy_from_slice(embedding_row(&self.words, *id as usize, hidden));
                let padding = self.config.first_position > 0 && *id == self.config.padding_token;
                // RoBERTa does not count padding tokens, which have a position of their own.
                let at = if padding {
                    self.config.first_position - 1
                } else {
                    position
                };
                position += usize::from(!padding);
                add(row, embedding_row(&self.positions, at, hidden));
                if !self.token_types.is_empty() {
                    let kind = sequence.types.get(index).map_or(0, |kind| *kind as usize);
                    add(row, embedding_row(&self.token_types, kind, hidden));
                }
            }
        }
        self.embedding_norm.apply(states, self.config.norm_epsilon);
    }

    fn attend(&self, threads: &ThreadGroup, scratch: &mut Scratch, layer: &Layer, output_rows: OutputRows) {
        let hidden = self.config.hidden;
        let rows = scratch.spans.last().map_or(0, |span| span.end);
        let fused = scratch.fused.reserve(rows * 3 * hidden);
        let states = &scratch.states.as_slice()[..rows * hidden];
        let mode = (Accumulate::Overwrite, Activation::Identity);
        layer
            .query_key_value
            .apply(threads, &mut scratch.quantized, states, fused, mode);
        let out_rows = if output_rows == OutputRows::First {
            scratch.spans.len()
        } else {
            rows
        };
        let context = scratch.context.reserve(out_rows * hidden);
        let input = attention::AttentionInput {
            fused,
            hidden,
            heads: self.config.heads,
            relative_bias: &self.relative_bias,
            output_rows,
        };
        attention::run(threads, &mut scratch.attention, &input, &scratch.spans, context);
        if output_rows == OutputRows::First {
            let first = scratch.first.reserve(out_rows * hidden);
            for (row, span) in first.chunks_exact_mut(hidden).zip(&scratch.spans) {
                row.copy_from_slice(embedding_row(scratch.states.as_slice(), span.start, hidden));
            }
            scratch.states.reserve(out_rows * hidden).copy_from_slice(first);
        }
        let context = &scratch.context.as_slice()[..out_rows * hidden];
        let states = scratch.states.reserve(out_rows * hidden);
        let mode = (Accumulate::Add, Activation::Identity);
        layer
            .attention_output
            .apply(threads, &mut scratch.quantized, context, states, mode);
        layer.attention_norm.apply(states, self.config.norm_epsilon);
    }

    fn feed_forward(&self, threads: &ThreadGroup, scratch: &mut Scratch, layer: &Layer, rows: usize) {
        let states = scratch.states.reserve(rows * self.config.hidden);
        let inner = scratch.inner.reserve(rows * self.config.intermediate);
        let (quantized, mode) = (
            &mut scratch.quantized,
            (Accumulate::Overwrite, self.config.activation),
        );
        layer.up.apply(threads, quantized, states, inner, mode);
        let mode = (Accumulate::Add, Activation::Identity);
        layer.down.apply(threads, quantized, inner, states, mode);
        layer.output_norm.apply(states, self.config.norm_epsilon);
    }
}

fn embedding_row(table: &[f32], row: usize, width: usize) -> &[f32] {
    &table[row * width..(row + 1) * width]
}

fn add(row: &mut [f32], other: &[f32]) {
    for (value, other) in row.iter_mut().zip(other) {
        *value += other;
    }
}
