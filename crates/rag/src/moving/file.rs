//! Exports in files.
//!
//! A file is written under another name and gets its own only when it is whole and on the disk. What
//! is written so far is noted beside it after every page, so that an export that broke off goes on.

use std::ffi::OsString;
use std::fs::File;
use std::io::{BufRead, BufReader, BufWriter, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use async_trait::async_trait;
use ragstone_core::error::InvalidInput;
use ragstone_core::store::{MovedDocument, Place};
use serde::{Deserialize, Serialize};

use super::format::{DocumentLine, End, Head, Sum, Summing};
use super::transfer::check_claim;
use super::{BATCH, PeerSource, Progress, Source};
use crate::error::ServiceError;

/// A line may not be longer than this.
const LONGEST_LINE: u64 = 1 << 30;
/// A batch ends early when its lines are this long together.
const BATCH_BYTES: usize = 32 << 20;

type Reader = Box<dyn BufRead + Send>;

/// An export that is read.
pub struct FileSource {
    pub head: Head,
    lines: Option<Lines>,
    claim: Option<Sum>,
}

struct Lines {
    reader: Reader,
    /// Of the last line that was read, from 1.
    number: u64,
}

impl FileSource {
    /// A file that lacks its end is refused before anything of it is used.
    pub fn open(path: &Path) -> Result<Self, ServiceError> {
        let failed = |source| ServiceError::File {
            what: format!("{} cannot be read", path.display()),
            source,
        };
        let mut file = File::open(path).map_err(failed)?;
        const TAIL: u64 = 1024;
        let length = file.metadata().map_err(failed)?.len();
        let mut tail = Vec::new();
        file.seek(SeekFrom::Start(length.saturating_sub(TAIL)))
            .and_then(|_| file.read_to_end(&mut tail))
            .and_then(|_| file.rewind())
            .map_err(failed)?;
        let last = tail.trim_ascii_end().rsplit(|byte| *byte == b'\n').next();
        if last.and_then(End::parse).is_none() {
            return Err(incomplete(&path.display().to_string()).into());
        }
        Self::read(Box::new(BufReader::with_capacity(1 << 20, file)))
    }

    pub fn read(reader: Reader) -> Result<Self, ServiceError> {
        let mut lines = Lines { reader, number: 0 };
        let head = match lines.next()? {
            Some(line) => Head::parse(&line)?,
            None => {
                return Err(
                    InvalidInput::new("the export is empty: not even its first line is there").into(),
                );
            }
        };
        Ok(Self {
            head,
            lines: Some(lines),
            claim: None,
        })
    }
}

fn incomplete(what: &str) -> InvalidInput {
    InvalidInput::new(format!(
        "{what} is not a whole export: its last line, which counts the documents, is missing"
    ))
}

#[async_trait]
impl Source for FileSource {
    async fn next(&mut self) -> Result<Vec<MovedDocument>, ServiceError> {
        if self.claim.is_some() {
            return Ok(Vec::new());
        }
        let Some(mut lines) = self.lines.take() else {
            return Err(incomplete("this").into());
        };
        let read = tokio::task::spawn_blocking(move || {
            let batch = lines.batch();
            (lines, batch)
        });
        let (lines, batch) = read.await.map_err(|error| ServiceError::File {
            what: "reading was given up".into(),
            source: std::io::Error::other(error),
        })?;
        let (documents, end) = batch?;
        self.claim = end;
        self.lines = Some(lines);
        Ok(documents)
    }

    fn claim(&self) -> Option<&Sum> {
        self.claim.as_ref()
    }
}

impl Lines {
    /// Documents, and the last line if it was reached.
    fn batch(&mut self) -> Result<(Vec<MovedDocument>, Option<Sum>), ServiceError> {
        let mut documents = Vec::new();
        let mut bytes = 0;
        while documents.len() < BATCH && bytes < BATCH_BYTES {
            let Some(line) = self.next()? else {
                return Err(incomplete("this").into());
            };
            if let Some(end) = End::parse(&line) {
                if self.next()?.is_some() {
                    return Err(self
                        .at("there is more after the line that counts the documents")
                        .into());
                }
                return Ok((documents, Some(end)));
            }
            bytes += line.len();
            let parsed: DocumentLine<'_> =
                serde_json::from_slice(&line).map_err(|error| self.at(&error.to_string()))?;
            documents.push(parsed.check().map_err(|problem| self.at(problem.message()))?);
        }
        Ok((documents, None))
    }

    /// The next line that is not empty.
    fn next(&mut self) -> Result<Option<Vec<u8>>, ServiceError> {
        loop {
            let mut line = Vec::new();
            let read = self
                .reader
                .by_ref()
                .take(LONGEST_LINE)
                .read_until(b'\n', &mut line);
            let read = read.map_err(|source| ServiceError::File {
                what: "the export cannot be read".into(),
                source,
            })?;
            if read == 0 {
                return Ok(None);
            }
            self.number += 1;
            if read as u64 == LONGEST_LINE {
                return Err(self.at("the line is too long").into());
            }
            if !line.trim_ascii().is_empty() {
                return Ok(Some(line));
            }
        }
    }

    fn at(&self, problem: &str) -> InvalidInput {
        InvalidInput::new(format!("line {}: {problem}", self.number))
    }
}

/// Reads a whole export and checks every line of it. Blocks.
pub fn verify_file(path: &Path) -> Result<Sum, ServiceError> {
    let mut lines = match FileSource::open(path)?.lines {
        Some(lines) => lines,
        None => return Err(incomplete("this").into()),
    };
    let mut sum = Summing::default();
    loop {
        let (documents, end) = lines.batch()?;
        documents.iter().for_each(|moved| sum.add(moved));
        if let Some(claim) = end {
            let sum = sum.finish();
            check_claim(Some(&claim), &sum)?;
            return Ok(sum);
        }
    }
}

/// How far an export has come.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Note {
    /// Of the collection and the store it is in.
    origin: String,
    head: Head,
    place: i64,
    documents: u64,
    bytes: u64,
}

/// An export that is being written, under a name of its own.
pub struct ExportFile {
    path: PathBuf,
    out: BufWriter<File>,
    note: Note,
    sum: Summing,
}

impl ExportFile {
    /// Begins an export, or goes on with one that broke off. `origin` tells stores apart: places
    /// of one mean nothing in another.
    pub fn begin(path: &Path, head: &Head, origin: &str) -> Result<Self, ServiceError> {
        if let Some(begun) = Self::resume(path, head, origin) {
            return Ok(begun);
        }
        let failed = cannot_write(path);
        let out = File::create(part(path)).map_err(&failed)?;
        let mut export = Self {
            path: path.to_owned(),
            out: BufWriter::new(out),
            note: Note {
                origin: origin.to_owned(),
                head: head.clone(),
                place: i64::MIN,
                documents: 0,
                bytes: 0,
            },
            sum: Summing::default(),
        };
        let mut line = Vec::new();
        write_line(&mut line, head).map_err(&failed)?;
        export.append(&line).map_err(&failed)?;
        Ok(export)
    }

    /// `None` where there is nothing to go on with, or it is not what the note says.
    fn resume(path: &Path, head: &Head, origin: &str) -> Option<Self> {
        let note: Note = serde_json::from_slice(&std::fs::read(note_path(path)).ok()?).ok()?;
        if note.origin != origin || note.head != *head || note.documents == 0 {
            return None;
        }
        let file = File::options().read(true).write(true).open(part(path)).ok()?;
        file.set_len(note.bytes).ok()?;
        let mut lines = Lines {
            reader: Box::new(BufReader::with_capacity(1 << 20, file.try_clone().ok()?)),
            number: 0,
        };
        if Head::parse(&lines.next().ok()??).ok()? != *head {
            return None;
        }
        let mut sum = Summing::default();
        while let Some(line) = lines.next().ok()? {
            let document = serde_json::from_slice::<DocumentLine<'_>>(&line).ok()?;
            sum.add(&document.check().ok()?);
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

    /// Behind which place it goes on, and how many documents it has.
    pub fn begun(&self) -> (Option<Place>, u64) {
        let place = (self.note.documents > 0).then_some(Place(self.note.place));
        (place, self.note.documents)
    }

    fn append(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        self.out.write_all(bytes)?;
        self.note.bytes += bytes.len() as u64;
        Ok(())
    }

    fn page(&mut self, documents: &[MovedDocument], last: Option<Place>) -> std::io::Result<()> {
        let mut lines = Vec::new();
        write_documents(&mut lines, documents, &mut self.sum)?;
        self.append(&lines)?;
        self.out.flush()?;
        self.note.documents = self.sum.documents();
        self.note.place = last.map_or(self.note.place, |place| place.0);
        std::fs::write(note_path(&self.path), serde_json::to_vec(&self.note)?)
    }

    /// Writes the last line, brings it all to the disk, reads it back, and gives it its name.
    fn finish(mut self) -> Result<Sum, ServiceError> {
        let failed = cannot_write(&self.path);
        let sum = self.sum.clone().finish();
        let mut line = Vec::new();
        write_line(&mut line, &End { end: sum.clone() }).map_err(&failed)?;
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

/// Makes a name in a folder survive a power cut.
fn sync_folder(path: &Path) -> std::io::Result<()> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    File::open(folder.unwrap_or(Path::new(".")))?.sync_all()
}

fn cannot_write(path: &Path) -> impl Fn(std::io::Error) -> ServiceError + use<> {
    let what = format!("{} cannot be written", path.display());
    move |source| ServiceError::File {
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
    documents: &[MovedDocument],
    sum: &mut Summing,
) -> std::io::Result<()> {
    for moved in documents {
        sum.add(moved);
        write_line(out, &DocumentLine::from(moved))?;
    }
    Ok(())
}

/// Writes a collection into a file; `source` begins where the export was left.
pub async fn export_file(
    mut source: PeerSource<'_>,
    export: ExportFile,
    progress: &Progress,
) -> Result<Sum, ServiceError> {
    let failed = cannot_write(&export.path);
    progress.add(export.note.documents as usize);
    let mut page = source.next().await?;
    let mut export = export;
    while !page.is_empty() {
        let (count, last) = (page.len(), source.last());
        let written = async {
            let written = tokio::task::spawn_blocking(move || {
                export.page(&page, last)?;
                Ok(export)
            });
            written
                .await
                .unwrap_or_else(|error| Err(std::io::Error::other(error)))
                .map_err(&failed)
        };
        // Whatever becomes of the next page, this one is written to its end before the file is let go.
        let (written, next) = futures::future::join(written, source.next()).await;
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
    mut source: PeerSource<'_>,
    head: &Head,
    out: &mut (dyn Write + Send),
    progress: &Progress,
) -> Result<Sum, ServiceError> {
    let failed = |source| ServiceError::File {
        what: "the export cannot be written".into(),
        source,
    };
    let mut sum = Summing::default();
    let mut out = out;
    write_line(&mut out, head).map_err(failed)?;
    loop {
        let page = source.next().await?;
        if page.is_empty() {
            break;
        }
        write_documents(&mut out, &page, &mut sum).map_err(failed)?;
        progress.add(page.len());
    }
    let sum = sum.finish();
    write_line(&mut out, &End { end: sum.clone() }).map_err(failed)?;
    out.flush().map_err(failed)?;
    Ok(sum)
}
