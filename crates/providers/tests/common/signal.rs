//! Signals to the processes of test servers.

use std::process::Command;
use std::time::Duration;

/// Pauses the processes, and waits until they have stopped: `kill` returns before they do, and until
/// then they answer requests.
pub fn pause(processes: &[u32]) {
    send("STOP", processes);
    for process in processes {
        let stopped = (0..12_000).any(|_| {
            std::thread::sleep(Duration::from_millis(10));
            is_stopped(*process)
        });
        assert!(stopped, "process {process} does not stop");
    }
}

pub fn resume(processes: &[u32]) {
    send("CONT", processes);
}

fn send(name: &str, processes: &[u32]) {
    let sent = Command::new("sh")
        .args(["-c", "kill -\"$0\" \"$@\"", name])
        .args(processes.iter().map(u32::to_string))
        .status();
    assert!(sent.is_ok_and(|status| status.success()), "the signal is sent");
}

/// Whether all threads of a process have stopped, or it has ended.
fn is_stopped(process: u32) -> bool {
    // `-L` lists threads on Linux; elsewhere `-M` would, and the state of the process has to do.
    let threads: &[&str] = if cfg!(target_os = "linux") { &["-L"] } else { &[] };
    let output = Command::new("ps")
        .args(threads)
        .args(["-o", "stat=", "-p", &process.to_string()])
        .output()
        .expect("ps runs");
    let states = String::from_utf8_lossy(&output.stdout);
    states.lines().all(|state| state.trim().starts_with('T'))
}
