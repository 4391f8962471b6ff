//! Exports that are written.
//!
//! A file is written under another name and gets its own only when it is whole and on the disk. What
//! is written so far is noted beside it after every page, so that an export that broke off goes on,
//! if the collection still begins with what was written.

use std::ffi::OsString;
use std::fs::File;
use std::io::{BufWriter, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use ragstone_core::storage::ExportedDocument;
use serde::{Deserialize, Serialize};

use crate::file::{Lines, verify_file};
use crate::format::{End, Head, Sum, Summing};
use crate::{BATCH, BackendSource, DocumentLine, TransferError, TransferProgress};

/// How far an export has come.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Note {
    head: Head,
    documents: u64,
    bytes: u64,
}

/// How an export was begun.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Begun {
    New,
    /// After so many documents that an earlier run wrote.
    Resumed {
        documents: u64,
    },
    /// What an earlier run wrote is not, or no longer, the beginning of the collection.
    Restarted,
}

/// An export that is being written, under a name of its own.
pub struct ExportFile {
    path: PathBuf,
    out: BufWriter<File>,
    note: Note,
    sum: Summing,
}

impl ExportFile {
    /// Begins an export, or goes on with one that broke off, if what that wrote is still how the
    /// collection begins. Leaves `source` behind what is written.
    pub async fn begin(
        path: &Path,
        head: &Head,
        source: &mut BackendSource<'_>,
    ) -> Result<(Self, Begun), TransferError> {
        check_place(path).map_err(cannot_write(path))?;
        let broke_off = note_path(path).exists();
        if let Some(export) = Self::resume(path, head)
            && export.is_beginning_of(source).await?
        {
            let documents = export.note.documents;
            return Ok((export, Begun::Resumed { documents }));
        }
        *source = BackendSource::new(source.backend, source.name);
        let begun = if broke_off { Begun::Restarted } else { Begun::New };
        let export = Self::create(path, head).map_err(cannot_write(path))?;
        Ok((export, begun))
    }

    fn create(path: &Path, head: &Head) -> std::io::Result<Self> {
        remove_if_there(&note_path(path))?;
        let mut export = Self {
            path: path.to_owned(),
            out: BufWriter::new(File::create(part(path))?),
            note: Note {
                head: head.clone(),
                documents: 0,
                bytes: 0,
            },
            sum: Summing::default(),
        };
        let mut line = Vec::new();
        write_line(&mut line, head)?;
        export.append(&line)?;
        Ok(export)
    }

    /// `None` where there is nothing to go on with, or it is not what the note says.
    fn resume(path: &Path, head: &Head) -> Option<Self> {
        let note: Note = serde_json::from_slice(&std::fs::read(note_path(path)).ok()?).ok()?;
        if note.head != *head || note.documents == 0 {
            return None;
        }
        let file = File::options().read(true).write(true).open(part(path)).ok()?;
        file.set_len(note.bytes).ok()?;
        let mut lines = Lines::of(file.try_clone().ok()?);
        if Head::parse(&lines.next().ok()??).ok()? != *head {
            return None;
        }
        let mut sum = Summing::default();
        while let Some(line) = lines.next().ok()? {
            sum.add(&DocumentLine::parse(&line).ok()?.check().ok()?);
        }
        let mut out = BufWriter::new(file);
        let whole = sum.documents() == note.documents && out.seek(SeekFrom::End(0)).ok()? == note.bytes;
        whole.then(|| Self {
            path: path.to_owned(),
            out,
            note,
            sum,
        })
    }

    /// A collection may have been written to, or be another one of the same name, since the earlier
    /// run; reading is what tells, in every store.
    async fn is_beginning_of(&self, source: &mut BackendSource<'_>) -> Result<bool, TransferError> {
        let mut found = Summing::default();
        while found.documents() < self.note.documents {
            let left = usize::try_from(self.note.documents - found.documents()).unwrap_or(BATCH);
            let page = source.up_to(left.min(BATCH)).await?;
            if page.is_empty() {
                return Ok(false);
            }
            page.iter().for_each(|moved| found.add(moved));
        }
        Ok(found.finish() == self.sum.clone().finish())
    }

    fn append(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        self.out.write_all(bytes)?;
        self.note.bytes += bytes.len() as u64;
        Ok(())
    }

    fn page(&mut self, documents: &[ExportedDocument]) -> std::io::Result<()> {
        let mut lines = Vec::new();
        write_documents(&mut lines, documents, &mut self.sum)?;
        self.append(&lines)?;
        self.out.flush()?;
        self.note.documents = self.sum.documents();
        std::fs::write(note_path(&self.path), serde_json::to_vec(&self.note)?)
    }

    /// Writes the last line, brings it all to the disk, reads it back, and gives it its name.
    fn finish(mut self) -> Result<Sum, TransferError> {
        let failed = cannot_write(&self.path);
        let sum = self.sum.clone().finish();
        let mut line = Vec::new();
        write_line(&mut line, &End::new(&sum, &self.note.head)).map_err(&failed)?;
        self.append(&line).map_err(&failed)?;
        let file = self
            .out
            .into_inner()
            .map_err(|error| failed(error.into_error()))?;
        file.sync_all().map_err(&failed)?;
        let part = part(&self.path);
        if verify_file(&part)? != sum {
            let damaged = std::io::Error::other("what was read back is not what was written");
            return Err(failed(damaged));
        }
        std::fs::rename(&part, &self.path).map_err(&failed)?;
        let _ = std::fs::remove_file(note_path(&self.path));
        sync_folder(&self.path).map_err(&failed)?;
        Ok(sum)
    }
}

/// In the end the export is given its name, and what has it now goes: never a device or a socket.
fn check_place(path: &Path) -> std::io::Result<()> {
    match std::fs::metadata(path) {
        Ok(there) if !there.is_file() => Err(std::io::Error::other(
            "it is not a file; `-` writes to standard output, which can be led anywhere",
        )),
        _ => Ok(()),
    }
}

fn remove_if_there(path: &Path) -> std::io::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Makes a name in a folder survive a power cut.
fn sync_folder(path: &Path) -> std::io::Result<()> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    File::open(folder.unwrap_or(Path::new(".")))?.sync_all()
}

fn cannot_write(path: &Path) -> impl Fn(std::io::Error) -> TransferError + use<> {
    let what = format!("{} cannot be written", path.display());
    move |source| TransferError::File {
        what: what.clone(),
        source,
    }
}

fn part(path: &Path) -> PathBuf {
    with_suffix(path, ".part")
}

fn note_path(path: &Path) -> PathBuf {
    with_suffix(path, ".part.json")
}

fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = OsString::from(path);
    name.push(suffix);
    name.into()
}

fn write_line(out: &mut impl Write, line: &impl Serialize) -> std::io::Result<()> {
    serde_json::to_writer(&mut *out, line)?;
    out.write_all(b"\n")
}

fn write_documents(
    out: &mut impl Write,
    documents: &[ExportedDocument],
    sum: &mut Summing,
) -> std::io::Result<()> {
    for moved in documents {
        sum.add(moved);
        write_line(out, &DocumentLine::from(moved))?;
    }
    Ok(())
}

/// Writes a collection into a file; `source` is behind what the export has.
pub async fn export_file(
    mut source: BackendSource<'_>,
    export: ExportFile,
    progress: &TransferProgress,
) -> Result<Sum, TransferError> {
    let failed = cannot_write(&export.path);
    progress.add(export.note.documents as usize);
    let mut page = source.next_or_grown(export.sum.documents()).await?;
    let mut export = export;
    while !page.is_empty() {
        let count = page.len();
        let read = export.sum.documents() + count as u64;
        let written = async {
            let written = tokio::task::spawn_blocking(move || {
                export.page(&page)?;
                Ok(export)
            });
            written
                .await
                .unwrap_or_else(|error| Err(std::io::Error::other(error)))
                .map_err(&failed)
        };
        // Whatever becomes of the next page, this one is written to its end before the file is let go.
        let (written, next) = futures::future::join(written, source.next_or_grown(read)).await;
        export = written?;
        progress.add(count);
        page = next?;
    }
    tokio::task::spawn_blocking(move || export.finish())
        .await
        .unwrap_or_else(|error| Err(failed(std::io::Error::other(error))))
}

/// Writes a collection to where nothing can be taken back, such as a pipe.
pub async fn export_to(
    mut source: BackendSource<'_>,
    head: &Head,
    out: &mut (dyn Write + Send),
    progress: &TransferProgress,
) -> Result<Sum, TransferError> {
    let failed = |source| TransferError::File {
        what: "the export cannot be written".into(),
        source,
    };
    let mut sum = Summing::default();
    let mut out = out;
    write_line(&mut out, head).map_err(failed)?;
    loop {
        let page = source.next_or_grown(sum.documents()).await?;
        if page.is_empty() {
            break;
        }
        write_documents(&mut out, &page, &mut sum).map_err(failed)?;
        progress.add(page.len());
    }
    let sum = sum.finish();
    write_line(&mut out, &End::new(&sum, head)).map_err(failed)?;
    out.flush().map_err(failed)?;
    Ok(sum)
}
