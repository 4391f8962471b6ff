//! Makes sqlite-vec part of every connection this process opens.

use std::sync::Once;

static REGISTERED: Once = Once::new();

/// Registers the extension's entry point; further calls do nothing.
#[allow(unsafe_code)]
pub(crate) fn register() {
    REGISTERED.call_once(|| {
        // SAFETY: `sqlite3_vec_init` is the extension's C entry point, compiled against this very
        // SQLite. Its binding leaves out the three parameters every entry point has; the transmute
        // gives them back. SQLite keeps the pointer for the life of the process, as the function.
        unsafe {
            rusqlite::ffi::sqlite3_auto_extension(Some(std::mem::transmute::<
                *const (),
                unsafe extern "C" fn(
                    *mut rusqlite::ffi::sqlite3,
                    *mut *mut std::ffi::c_char,
                    *const rusqlite::ffi::sqlite3_api_routines,
                ) -> std::ffi::c_int,
            >(
                sqlite_vec::sqlite3_vec_init as *const ()
            )));
        }
    });
}
