//! `ragstone serve`.

use ragstone_models::catalog;

use super::{ServeArgs, block_on};
use crate::config::{ConfigError, EmbeddingsChoice, Settings};
use crate::{startup, telemetry};

pub(super) fn run(args: &ServeArgs) -> anyhow::Result<()> {
    if args.list_reranker_models {
        print_list();
        return Ok(());
    }
    telemetry::start_logs(args.log_format);
    let settings = args.server.settings()?;
    if args.download_models {
        block_on(download(settings))
    } else {
        block_on(startup::serve(settings))
    }
}

async fn download(settings: Settings) -> anyhow::Result<()> {
    if settings.embeddings == EmbeddingsChoice::None && settings.cross_encoder.is_none() {
        return Err(ConfigError("--download-models: no model is configured".to_owned()).into());
    }
    startup::load_models(&settings, None).await?;
    tracing::info!("all models are in the cache");
    Ok(())
}

#[allow(clippy::print_stdout, reason = "the list is the result of the command")]
fn print_list() {
    print!("{}", catalog::render());
}
