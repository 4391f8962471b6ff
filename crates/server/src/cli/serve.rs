//! `ragstone serve`.

use ragstone_models::catalog;

use super::{ServeArgs, block_on};
use crate::config::{self, EmbeddingsChoice, Layers, Settings};
use crate::{startup, telemetry};

pub(super) fn run(args: &ServeArgs) -> anyhow::Result<()> {
    if args.list_reranker_models {
        print_list();
        return Ok(());
    }
    let env = &config::process_env;
    telemetry::start_logs(config::log_format(args.log_format, env)?);
    let file = config::read_file(args.config.as_deref(), env)?;
    let settings = config::build(Layers {
        flags: args.flags(),
        env,
        file,
    })?;
    if args.download_models {
        block_on(download(settings))
    } else {
        block_on(startup::serve(settings))
    }
}

async fn download(settings: Settings) -> anyhow::Result<()> {
    if settings.embeddings == EmbeddingsChoice::None && settings.cross_encoder.is_none() {
        return Err(config::ConfigError("--download-models: no model is configured".to_owned()).into());
    }
    startup::load_models(&settings, None).await?;
    tracing::info!("all models are in the cache");
    Ok(())
}

#[allow(clippy::print_stdout, reason = "the list is the result of the command")]
fn print_list() {
    print!("{}", catalog::render());
}

/// The help of `--cross-encoder`, with the curated models as examples.
pub(super) fn cross_encoder_help() -> String {
    let mut help =
        "Cross-encoder for reranking, from the Hugging Face hub [env: CROSS_ENCODER_MODEL]. Examples:"
            .to_owned();
    for model in catalog::CROSS_ENCODERS {
        help.push_str(&format!(
            "\n  {} ({}, {})",
            model.name,
            model.size,
            model.use_case.name()
        ));
    }
    help.push_str("\nSee --list-reranker-models for all of them");
    help
}
